"""Errors about checkpoints, which are defined where their formats are read."""

from minisgl.errors import ModelError

__all__ = ["ModelError"]
