"""Architectures from Hugging Face configs, and their checkpoints. Importing this package does not import torch."""
