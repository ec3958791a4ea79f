"""Progress of a fetch, published as FetchStatus and logged."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from minisgl.wire.status import FetchStatus

logger = logging.getLogger(__name__)

LOG_SECONDS: Final = 10.0


class FetchProgress:
    """Counts bytes and publishes each change of the status. Used by all download threads."""

    def __init__(self, name: str, publish: Callable[[FetchStatus], None]) -> None:
        """`name` is that of the repository, for the log."""
        self._name = name
        self._publish = publish
        self._lock = threading.Lock()
        self._status = FetchStatus()
        self._total = 1
        self._received = 0
        self._most_received = 0
        self._logged_at = 0.0

    def start_download(self, total: int) -> None:
        """Set the number of bytes of all files, of which none is received."""
        self._total = total or 1
        self._received = 0

    def update(self, **changes: Any) -> FetchStatus:
        """Change fields of the status and publish it; returns it."""
        with self._lock:
            return self._update(changes)

    def repeat(self) -> None:
        """Publish the unchanged status, which shows that the process is not hung."""
        self._publish(self._status)

    def add_bytes(self, number: int) -> None:
        """Count received bytes, or discarded ones if negative. Progress clears the reason of the last failure."""
        with self._lock:
            self._received += number
            percent = min(99, self._received * 100 // self._total)
            if self._received > self._most_received:
                self._most_received = self._received
                self._clear_failure(percent=percent)
            now = time.monotonic()
            if now >= self._logged_at + LOG_SECONDS:
                self._logged_at = now
                logger.info("%s: %d %% of %s", self._name, percent, format_bytes(self._total))

    def clear_failure(self) -> None:
        """Remove the reason of the last failure, after a success. A new attempt alone does not remove it."""
        with self._lock:
            self._clear_failure()

    def _clear_failure(self, **changes: Any) -> None:
        changes |= {"reason": "", "message": ""}
        if any(getattr(self._status, name) != value for name, value in changes.items()):
            self._update(changes)

    def _update(self, changes: dict[str, Any]) -> FetchStatus:
        self._status = msgspec.structs.replace(self._status, **changes)
        self._publish(self._status)
        return self._status


def format_bytes(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**29 else f"{size / 2**20:.1f} MiB"
