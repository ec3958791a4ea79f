"""Failures of the past in a file, so that the restart budget outlives the container's restarts."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from minisgl.wire.status import Failure

_KEPT: Final = 1000
_MAX_BYTES: Final = 64 << 20

_decoder: Final = msgspec.json.Decoder(list[Failure])


class History:
    """Failures that were followed by a restart, oldest first."""

    def __init__(self, path: Path) -> None:
        """What is not readable there is as good as nothing: a damaged file must not keep a replica down."""
        self._path = path
        self.failures: list[Failure] = []
        try:
            if path.stat().st_size <= _MAX_BYTES:
                self.failures = _decoder.decode(path.read_bytes())
        except (OSError, msgspec.MsgspecError):
            return

    def add(self, failure: Failure) -> None:
        """Raises OSError."""
        self.failures = [*self.failures, failure][-_KEPT:]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".part")
        unfinished.write_bytes(msgspec.json.encode(self.failures))
        unfinished.rename(self._path)

    def ages(self, now: datetime, window: float) -> list[float]:
        """Seconds since each of those that are at most `window` seconds old."""
        ages = [(now - datetime.fromisoformat(failure.at)).total_seconds() for failure in self.failures]
        return [age for age in ages if 0 <= age < window]
