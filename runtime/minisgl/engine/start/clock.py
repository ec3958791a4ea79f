"""Duration of each phase of a rank's start."""

from __future__ import annotations

import time

import torch


class StartClock:
    """Stopwatch that starts with its creation. A phase lasts from the end of the one before it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """Seconds by phase, in order."""
        self._since = time.monotonic()

    def end(self, phase: str, device: torch.device) -> None:
        """End `phase` when the device has finished its queued work."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.monotonic()
        self.seconds[phase] = now - self._since
        self._since = now
