"""Ahead-of-time compilation of kernels, on machines without a GPU."""
