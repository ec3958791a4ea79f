"""Errors of the launcher that its caller shows to a person."""

from __future__ import annotations


class LauncherError(Exception):
    """Something that the user can act on. `code` is stable; the message says what is wrong and what to do next."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
