"""The version, where every room can reach it."""

__version__ = "0.2.0.dev0"
