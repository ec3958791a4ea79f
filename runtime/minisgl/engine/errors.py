"""What can go wrong with an engine from outside."""

from __future__ import annotations

from minisgl.errors import CodedError


class EngineError(CodedError):
    """The engine cannot start or go on as asked. `code` is stable; the message says what to do next."""
