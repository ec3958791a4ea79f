"""Queue, admission to the batch, pages, prefix cache, step plans and the step loop. Imports no models or kernels."""
