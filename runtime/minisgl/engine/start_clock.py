"""How long each phase of a rank's start takes."""

from __future__ import annotations

import time

import torch


class StartClock:
    """Runs from its making on. A phase lasts from the end of the one before it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """By phase, in their order."""
        self._since = time.monotonic()

    def end(self, phase: str, device: torch.device) -> None:
        """`phase` is over once the device has done what was asked of it."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.monotonic()
        self.seconds[phase] = now - self._since
        self._since = now
