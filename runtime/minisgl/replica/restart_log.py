"""Log of past failures in a file, so that the restart budget outlives restarts of the container."""

from __future__ import annotations

import logging
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from minisgl.wire.status import Failure

logger = logging.getLogger(__name__)

_KEPT: Final = 1000
_MAX_BYTES: Final = 64 << 20

_decoder: Final = msgspec.json.Decoder(list[Failure])


class RestartLog:
    """Failures that were followed by a restart, oldest first."""

    def __init__(self, path: Path) -> None:
        """An unreadable file counts as empty: a damaged one must not keep a replica from starting."""
        self._path = path
        self.failures: list[Failure] = []
        try:
            if path.stat().st_size <= _MAX_BYTES:
                self.failures = _decoder.decode(path.read_bytes())
        except (OSError, msgspec.MsgspecError):
            return

    def add(self, failure: Failure) -> None:
        """Append a failure. A file that cannot be written is logged."""
        self.failures = [*self.failures, failure][-_KEPT:]
        unfinished = self._path.with_suffix(".part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(msgspec.json.encode(self.failures))
            unfinished.rename(self._path)
        except OSError as error:
            logger.warning("cannot write the restart log %s: %s", self._path, error)

    def ages(self, now: datetime, window: float) -> list[float]:
        """Seconds since each failure that is at most `window` seconds old."""
        ages = [(now - datetime.fromisoformat(failure.at)).total_seconds() for failure in self.failures]
        return [age for age in ages if 0 <= age < window]
