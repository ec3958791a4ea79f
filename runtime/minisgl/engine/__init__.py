"""One rank: weights, KV pool, graphs, forward pass, sampling. Importing this package does not import torch."""
