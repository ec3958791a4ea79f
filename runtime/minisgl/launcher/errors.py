"""Errors of the launcher that users see."""

from __future__ import annotations

from minisgl.errors import CodedError


class LauncherError(CodedError):
    """An error that the user can act on. `code` is stable; the message states the problem and the next step."""
