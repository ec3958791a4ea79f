"""The API server's clock, from the header Date of its responses.

Deletions, conditions of nodes and deadlines of rollouts have the server's time. A machine whose own clock is minutes
ahead would delete pods of live nodes by force, and give up revisions too early.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Final

_RESOLUTION: Final = 1.0
"""Seconds; a Date has no fractions."""


class ServerClock:
    """Before the first response it is this machine's clock. A step of that one has no effect afterwards."""

    def __init__(
        self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`wall`: this machine's time of day, in seconds since 1970."""
        self._monotonic = monotonic
        self._offset = wall() - monotonic()
        """Seconds from the monotonic clock to the server's."""

    def now(self) -> datetime:
        return datetime.fromtimestamp(0, UTC) + timedelta(seconds=self._monotonic() + self._offset)

    def observe(self, date: str | None, sent: float) -> None:
        """Take the Date of a response that has just arrived; None: it has none. `sent`: time of the request by the
        monotonic clock. The clock moves only if it contradicts the Date, so that it does not jitter."""
        try:
            found = None if date is None else parsedate_to_datetime(date)
        except ValueError:
            return
        if found is None or found.tzinfo is None:
            return
        seconds = found.timestamp()
        # The server read its clock between the request and the response.
        least, most = seconds - self._monotonic(), seconds + _RESOLUTION - sent
        self._offset = min(max(self._offset, least), most)
