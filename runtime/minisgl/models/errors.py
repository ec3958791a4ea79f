"""What can be wrong with a model from outside."""

from __future__ import annotations

from minisgl.errors import CodedError


class ModelError(CodedError):
    """A checkpoint that cannot be served as asked. `code` is stable; the message says what to do next."""
