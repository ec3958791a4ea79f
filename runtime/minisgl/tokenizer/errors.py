"""Errors of the tokenizer."""

from __future__ import annotations

from minisgl.errors import CodedError


class TokenizerError(CodedError):
    """Tokenizer files that cannot be used. `code` is stable; the message says what to do next."""


class PromptError(CodedError):
    """A request whose prompt cannot be encoded: its client's fault, and nobody else's problem.

    `code` is stable; `param` is the field of the request that is to blame.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(code, message)
        self.param = param
