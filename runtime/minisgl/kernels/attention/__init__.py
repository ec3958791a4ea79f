"""Rotation and storage of keys and values, and attention over the paged KV pool."""
