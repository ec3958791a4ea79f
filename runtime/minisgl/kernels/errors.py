"""Errors of the kernels package that its caller shows to a person."""

from __future__ import annotations


class KernelBuildError(Exception):
    """Kernels could not be compiled. `code` is stable."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
