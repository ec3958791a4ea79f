"""The version, where every package can reach it."""

__version__ = "0.2.0.dev0"
