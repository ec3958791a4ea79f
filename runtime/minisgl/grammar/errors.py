"""Errors of grammars."""

from __future__ import annotations

from minisgl.errors import CodedError


class GrammarError(CodedError):
    """A constraint or grammar that cannot be used. `code` is stable; `path` is where it is wrong: a JSON pointer within
    a schema, or empty."""

    def __init__(self, code: str, message: str, path: str = "") -> None:
        super().__init__(code, message)
        self.path = path
