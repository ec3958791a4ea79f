"""Hand-written kernels. A module named `*_triton` is imported on CUDA only; what it computes is stated once, in
the torch version beside it."""
