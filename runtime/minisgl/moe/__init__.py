"""Mixture of experts: routing and the experts' feed-forward, as functions on tensors."""
