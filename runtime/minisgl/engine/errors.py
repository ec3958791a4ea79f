"""What can go wrong with an engine from outside."""

from __future__ import annotations


class EngineError(Exception):
    """The engine cannot start or go on as asked. `code` is stable; the message says what to do next."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
