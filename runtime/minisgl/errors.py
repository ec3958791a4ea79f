"""The base class of errors that a user can act on."""

from __future__ import annotations


class CodedError(Exception):
    """An error that commands and APIs show to people instead of a traceback.

    `code` is stable, so that programs can rely on it. The message says what is wrong with which value and what to do.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
