"""Errors of model files."""

from __future__ import annotations

from minisgl.errors import CodedError
from minisgl.wire.status import FetchFailureReason


class HubError(CodedError):
    """Model files cannot be found, fetched or stored."""


class FetchError(HubError):
    """A checkpoint cannot be fetched from a Hub."""

    code: FetchFailureReason

    def __init__(self, code: FetchFailureReason, message: str) -> None:
        super().__init__(code, message)

    @property
    def is_retryable(self) -> bool:
        return self.code not in ("AuthRequired", "NotFound")

    @property
    def exit_code(self) -> int:
        return 1 if self.is_retryable else 2
