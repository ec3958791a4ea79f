"""Worker ranks of a program that is rank 0 itself, as with `LLM`: no launcher supervises it."""

from __future__ import annotations

import logging
import os
import selectors
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from minisgl import logging as log
from minisgl.errors import LauncherError
from minisgl.launcher.group import Group, GroupSpec
from minisgl.launcher.process import ProcessSpec

logger = logging.getLogger(__name__)

_STOP_SECONDS: Final = 3.0
_POLL_SECONDS: Final = 0.1
_STUCK_SECONDS: Final = 30.0
"""Time after the exit of a worker rank, or after rank 0 began to wait for it, until rank 0 counts as stuck. No step of
rank 0 can finish without it, and a device that reports the loss does so sooner."""


class WorkerRanks:
    """Processes of ranks 1, 2, …, started and watched by one thread.

    The watching thread starts them itself because the kernel kills them with the thread that started them.
    """

    def __init__(self, specs: Sequence[ProcessSpec]) -> None:
        self._specs = specs
        self._exits, self._exited_at = "", 0.0
        self._exited = threading.Event()
        self._stopping = threading.Event()
        self._waiting_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="minisgl-worker-ranks", daemon=True)
        self._thread.start()

    def check(self, patience: float = 0.0) -> None:
        """Raises LauncherError `process_died` when a worker rank has exited, or exits within `patience` seconds."""
        if self._exited.wait(patience):
            raise LauncherError("process_died", self._exits)

    @contextmanager
    def waiting_for_ranks(self) -> Iterator[None]:
        """Context in which rank 0 may wait for worker ranks. A wait on the device for a dead rank cannot be
        interrupted, not even by Ctrl-C: after a while the whole process exits, with the reason on stderr."""
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._waiting_since = None

    def close(self) -> None:
        """Wait for the exit of the ranks, which rank 0 has asked to stop or which are done; kill those that take too
        long."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            group = Group(GroupSpec(name="ranks", processes=lambda number: self._specs), selector, "info", _log)
            group.start(1)
            deadline = float("inf")
            while group.observe().alive and time.monotonic() < deadline:
                for key, _ in selector.select(_POLL_SECONDS):
                    key.data()
                if self._stopping.is_set():
                    deadline = min(deadline, time.monotonic() + _STOP_SECONDS)
                elif group.observe().dead:
                    self._record_exits(group)
                    self._exit_if_stuck()
            if not self._stopping.is_set():
                self._record_exits(group)
                while not self._stopping.wait(_POLL_SECONDS):
                    self._exit_if_stuck()
            group.kill_and_close()

    def _record_exits(self, group: Group) -> None:
        if not self._exited.is_set():
            self._exits = group.describe_exits()
            self._exited_at = time.monotonic()
            self._exited.set()

    def _exit_if_stuck(self) -> None:
        since = self._waiting_since
        if since is not None and time.monotonic() - max(self._exited_at, since) > _STUCK_SECONDS:
            message = f"process_died: {self._exits}\nrank 0 waits for it on its device: exiting"
            print(message, file=sys.stderr, flush=True)
            # Flush the program's own output. The program may have closed or replaced it; that must not stop the exit.
            with suppress(Exception):
                sys.stdout.flush()
            os._exit(1)


def _log(line: log.Line) -> None:
    level = logging.getLevelNamesMapping().get(line.level.upper(), logging.WARNING)
    logger.log(level, "%s: %s", line.process, line.message)
