"""Layers of a decoder. Importing this package does not import torch."""
