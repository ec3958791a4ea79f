"""Errors of ahead-of-time compilation."""

from __future__ import annotations

from minisgl.errors import CodedError


class KernelBuildError(CodedError):
    """Kernels could not be compiled."""
