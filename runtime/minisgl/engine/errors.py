"""Errors of an engine that its callers handle."""

from __future__ import annotations

from minisgl.errors import CodedError


class EngineError(CodedError):
    """The engine cannot start or continue. `code` is stable; the message contains the remedy."""
