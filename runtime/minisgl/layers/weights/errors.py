"""Errors about checkpoints."""

from __future__ import annotations

from minisgl.errors import CodedError


class ModelError(CodedError):
    """The checkpoint cannot be served with these options."""
