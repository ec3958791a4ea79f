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


def describe(error: BaseException) -> str:
    """The first line of an error's text, with the name of its type unless the text is meant for users."""
    text = str(error).partition("\n")[0]
    if isinstance(error, CodedError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
