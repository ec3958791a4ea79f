"""Version of minisgl, in the lowest layer, so that every package can import it."""

__version__ = "0.3.0.dev0"
