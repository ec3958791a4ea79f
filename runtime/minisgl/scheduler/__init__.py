"""Queue, admission to the batch, pages, prefix cache, batch plans and the step loop. Knows no models or kernels."""
