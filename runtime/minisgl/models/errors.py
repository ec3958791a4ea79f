"""What can be wrong with a model from outside."""

from __future__ import annotations


class ModelError(Exception):
    """A checkpoint that cannot be served as asked. `code` is stable; the message says what to do next."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
