"""Attention over a paged KV pool: one reference in plain torch, and kernels for CUDA."""
