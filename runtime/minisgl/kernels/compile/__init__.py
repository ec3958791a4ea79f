"""What is no kernel: libraries of kernels, the cache of compiled ones, and the log of compilations."""
