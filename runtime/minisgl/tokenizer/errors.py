"""Errors of the tokenizer."""

from __future__ import annotations


class TokenizerError(Exception):
    """Tokenizer files that cannot be used. `code` is stable; the message says what to do next."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class PromptError(Exception):
    """A request whose prompt cannot be encoded: its client's fault, and nobody else's problem.

    `code` is stable; `param` is the field of the request that is to blame.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
