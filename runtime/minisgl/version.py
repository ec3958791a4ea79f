"""The version, where every room can reach it."""

__version__ = "0.1.0"
