"""Helpers that compare engines with transformers and with each other."""
