"""Errors of the launcher that its caller shows to a person."""

from __future__ import annotations

from minisgl.errors import CodedError


class LauncherError(CodedError):
    """Something that the user can act on. `code` is stable; the message says what is wrong and what to do next."""
