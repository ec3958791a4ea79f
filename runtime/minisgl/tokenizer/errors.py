"""Errors of the tokenizer."""

from __future__ import annotations

from minisgl.errors import CodedError


class TokenizerError(CodedError):
    """Tokenizer files that cannot be used. `code` is stable; the message contains the remedy."""


class PromptError(CodedError):
    """A prompt that cannot be encoded, because of its request alone. `code` is stable; `param` names the field of the
    request that is wrong."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(code, message)
        self.param = param
