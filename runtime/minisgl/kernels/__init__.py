"""Hand-written kernels, in rooms by operation. A module named `*_triton` or `*_gluon` is imported on CUDA only; the
torch version beside it, if there is one, defines its result."""
