"""How kernels are launched: dependent launch, and tensor maps for Hopper's copies."""
