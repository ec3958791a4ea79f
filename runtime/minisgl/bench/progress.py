"""Progress of requests on a terminal."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Final

_SECONDS: Final = 1.0
"""Between two lines: seldom enough not to disturb what is measured."""
_START_OF_LINE: Final = "\r\033[K"
"""Return to the beginning of a terminal's line and erase it."""


class Progress:
    """Numbers of requests of one run, shown in one line that is written again and again if stderr is a terminal."""

    def __init__(self, what: str, total: int) -> None:
        self.sent = 0
        self.answered = 0
        self.failed = 0
        self._what = what
        self._total = total
        self._began = time.monotonic()

    def __str__(self) -> str:
        running = self.sent - self.answered - self.failed
        failed = f", {self.failed} failed" if self.failed else ""
        seconds = time.monotonic() - self._began
        return f"{self.answered} of {self._total} {self._what} answered, {running} running{failed}, {seconds:.0f} s"

    async def show(self) -> None:
        """Write the line until this is cancelled, and erase it then."""
        if not sys.stderr.isatty():
            return
        try:
            while True:
                print(f"{_START_OF_LINE}{self}", end="", file=sys.stderr, flush=True)
                await asyncio.sleep(_SECONDS)
        finally:
            print(_START_OF_LINE, end="", file=sys.stderr, flush=True)
