"""The base class of errors that a user can act on."""

from __future__ import annotations


class CodedError(Exception):
    """An error that commands and APIs show to users instead of a traceback.

    `code` is stable, so that programs can rely on it. The message states what is wrong with which value and what
    to do.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    @property
    def exit_code(self) -> int:
        """Exit code of a command that fails with this error."""
        return 1
