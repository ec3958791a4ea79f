"""Sampling: random numbers, filters, logits processors, log-probabilities."""
