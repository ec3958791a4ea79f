"""Collectives between the ranks of a tensor-parallel group. Importing this package does not import torch."""
