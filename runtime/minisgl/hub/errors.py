"""Errors about model files."""

from __future__ import annotations

from minisgl.errors import CodedError


class HubError(CodedError):
    """Model files cannot be found, fetched or stored."""
