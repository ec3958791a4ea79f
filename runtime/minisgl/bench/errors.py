"""Errors of benchmarks."""

from __future__ import annotations

from minisgl.errors import CodedError


class BenchError(CodedError):
    """A benchmark cannot run with these arguments, or its results would be wrong."""
