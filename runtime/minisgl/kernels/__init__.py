"""Hand-written kernels. A module named `*_triton` is imported on CUDA only; the torch version
beside it defines its result."""
