"""Errors of a fetch: the one that a user sees, and those that a fetch acts on."""

from __future__ import annotations

from minisgl.errors import HubError
from minisgl.wire.status import FetchFailureReason


class FetchError(HubError):
    """A checkpoint cannot be fetched."""

    code: FetchFailureReason

    def __init__(self, code: FetchFailureReason, message: str) -> None:
        super().__init__(code, message)

    @property
    def is_retryable(self) -> bool:
        return self.code not in ("AuthRequired", "NotFound")

    @property
    def exit_code(self) -> int:
        return 1 if self.is_retryable else 2


class HttpFailure(Exception):
    """A Hub answered with an error."""

    def __init__(self, status: int, retry_after: float | None) -> None:
        super().__init__(f"HTTP status {status}")
        self.status = status
        self.retry_after = retry_after
        """Seconds of the Retry-After header."""


class WrongContent(Exception):
    """The received content is not that of the file."""


class ContentChanged(Exception):
    """A listed file has another content now, or is gone: the files have to be listed again."""
