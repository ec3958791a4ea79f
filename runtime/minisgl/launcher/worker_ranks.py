"""Ranks above 0 for a program that is rank 0 itself: offline use has no launcher process above it."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from minisgl import logging as log
from minisgl.launcher.errors import LauncherError
from minisgl.launcher.process import Process, ProcessSpec

logger = logging.getLogger(__name__)

_STOP_SECONDS: Final = 3.0
_POLL_SECONDS: Final = 0.1
_STUCK_SECONDS: Final = 30.0
"""From a follower's death on, or from when rank 0 began what needs it. No step of rank 0 can end without it, and the
device says so sooner, if it does at all."""


class WorkerRanks:
    """Processes of ranks 1, 2, …, started and watched by one thread.

    They are started on the thread that watches them because the kernel ends them with the thread that started them.
    """

    def __init__(self, specs: Sequence[ProcessSpec]) -> None:
        self._specs = specs
        self._death, self._died = "", 0.0
        self._dead = threading.Event()
        self._stopping = threading.Event()
        self._waiting_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="minisgl-followers", daemon=True)
        self._thread.start()

    def check(self, patience: float = 0.0) -> None:
        """Raises LauncherError `process_died` when a follower has ended, or ends within `patience` seconds."""
        if self._dead.wait(patience):
            raise LauncherError("process_died", self._death)

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """While rank 0 does what needs the followers. Where it waits on its device for one that has died, nothing
        interrupts it, Ctrl-C included: after a while the whole process is ended, with the reason on stderr."""
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._waiting_since = None

    def close(self) -> None:
        """Rank 0 has told them to end, or they are done; whoever takes long is killed."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            processes = []
            for spec in self._specs:
                process = Process(spec, "info", _log)
                process.watch(selector)
                processes.append(process)
            deadline = float("inf")
            while any(process.alive for process in processes) and time.monotonic() < deadline:
                for key, _ in selector.select(_POLL_SECONDS):
                    key.data()
                if self._stopping.is_set():
                    deadline = min(deadline, time.monotonic() + _STOP_SECONDS)
                elif dead := [process for process in processes if not process.alive]:
                    self._tell(dead)
                    self._end_if_stuck()
            if not self._stopping.is_set():
                self._tell(processes)
                while not self._stopping.wait(_POLL_SECONDS):
                    self._end_if_stuck()
            for process in processes:
                if process.alive:
                    process.signal(signal.SIGKILL)
                process.wait()
                process.close()

    def _tell(self, dead: Sequence[Process]) -> None:
        if not self._dead.is_set():
            self._death = "\n".join(process.death() for process in dead)
            self._died = time.monotonic()
            self._dead.set()

    def _end_if_stuck(self) -> None:
        since = self._waiting_since
        if since is not None and time.monotonic() - max(self._died, since) > _STUCK_SECONDS:
            print(f"process_died: {self._death}\nrank 0 waits for it on its device: ended", file=sys.stderr, flush=True)
            # The program's own output, which nothing else writes any more. It may have closed it, or replaced it by
            # anything, and ends all the same.
            with suppress(Exception):
                sys.stdout.flush()
            os._exit(1)


def _log(line: log.Line) -> None:
    level = logging.getLevelNamesMapping().get(line.level.upper(), logging.WARNING)
    logger.log(level, "%s: %s", line.process, line.message)
