"""Errors that a user can act on: their base class, and those of whole packages."""

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


class BenchError(CodedError):
    """A benchmark cannot run with these arguments, or its results would be wrong."""


class EngineError(CodedError):
    """The engine cannot start or continue. `code` is stable; the message contains the remedy."""


class LauncherError(CodedError):
    """An error that the user can act on. `code` is stable; the message states the problem and the next step."""


class HubError(CodedError):
    """Model files cannot be found, fetched or stored."""


class KernelBuildError(CodedError):
    """Kernels could not be compiled."""


class TokenizerError(CodedError):
    """Tokenizer files that cannot be used. `code` is stable; the message contains the remedy."""


class PromptError(CodedError):
    """A prompt that cannot be encoded, because of its request alone. `code` is stable; `param` names the field of the
    request that is wrong."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(code, message)
        self.param = param


class GrammarError(CodedError):
    """A constraint or grammar that cannot be used. `code` is stable; `path` is where it is wrong: a JSON pointer within
    a schema, or empty."""

    def __init__(self, code: str, message: str, path: str = "") -> None:
        super().__init__(code, message)
        self.path = path


class ModelError(CodedError):
    """The checkpoint cannot be served with these options."""
