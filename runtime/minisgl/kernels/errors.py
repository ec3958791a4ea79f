"""Errors of the kernels package that its caller shows to a person."""

from __future__ import annotations

from minisgl.errors import CodedError


class KernelBuildError(CodedError):
    """Kernels could not be compiled. `code` is stable."""
