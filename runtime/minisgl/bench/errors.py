"""Errors of benchmarks."""

from __future__ import annotations

from minisgl.errors import CodedError


class BenchError(CodedError):
    """A benchmark cannot run as asked, or its figures would be wrong."""
