"""Runs a group of processes that live and die together.

One thread and one selector: signals, the children's output and their control lines are all descriptors, so there is
no state that two threads share. The way of a group is written once, in `Supervisor.run`.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from minisgl import logging as log
from minisgl.launcher import control
from minisgl.launcher.errors import LauncherError
from minisgl.launcher.process import Process, ProcessSpec

logger = logging.getLogger(__name__)

_STOP_SECONDS: Final = 3.0
"""How long a process that was told to end may take before it is killed."""

_PROGRESS_SECONDS: Final = 2.0
"""Time between two lines about the same process during the start."""

_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequested(Exception):
    """SIGINT, SIGTERM or SIGHUP arrived."""


class Supervisor:
    """Starts `specs`, calls `on_ready` once all of them are ready, and keeps them until a signal or a death."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        startup_timeout: float,
        drain_timeout: float,
        log_level: log.LogLevel,
        on_line: Callable[[log.Line], None],
        on_ready: Callable[[], None],
    ) -> None:
        """Timeouts in seconds. `on_line` gets every line of output of every child."""
        self._specs = specs
        self._startup_timeout = startup_timeout
        self._drain_timeout = drain_timeout
        self._log_level = log_level
        self._on_line = on_line
        self._on_ready = on_ready
        self._selector = selectors.DefaultSelector()
        self.processes: list[Process] = []
        self._signals = 0
        self._signals_obeyed = 0

    def run(self) -> None:
        """Returns when a signal has ended the group. Call it on the main thread.

        Raises LauncherError `process_died` or `startup_timeout`. Either way no process is left.
        """
        with self._signals_as_events():
            try:
                for spec in self._specs:
                    process = Process(spec, self._log_level, self._on_line)
                    self.processes.append(process)
                    process.watch(self._selector)
                self._wait_until_ready()
                self._on_ready()
                while True:
                    self._turn(None)
            except StopRequested:
                self._drain()
            except LauncherError as error:
                self._announce(str(error))
                raise
            finally:
                self._end_all()

    def _wait_until_ready(self) -> None:
        start = time.monotonic()
        deadline = start + self._startup_timeout
        shown: dict[str, tuple[str, float]] = {}
        while waiting := [p for p in self.processes if not p.is_ready]:
            if time.monotonic() > deadline:
                state = ", ".join(f"{p.spec.name} ({p.progress})" for p in waiting)
                raise LauncherError(
                    "startup_timeout",
                    f"not ready after {self._startup_timeout:g} s: {state}. Allow more with --startup-timeout.",
                )
            self._turn(min(deadline, time.monotonic() + _PROGRESS_SECONDS))
            now = time.monotonic()
            for process in self.processes:
                text = "ready" if process.is_ready else process.progress
                previous, at = shown.get(process.spec.name, ("starting", 0.0))
                if text != previous and (process.is_ready or now - at >= _PROGRESS_SECONDS):
                    shown[process.spec.name] = text, now
                    logger.info("%s: %s", process.spec.name, text, extra={"seconds": round(now - start, 1)})

    def _drain(self) -> None:
        """Let the processes with clients finish what they have begun; a second signal or a death ends that.

        Raises LauncherError when a process died of something else than the signal."""
        draining = [p for p in self.processes if p.spec.drains and p.is_ready and p.alive]
        if not draining or not all(p.is_ready for p in self.processes):
            return
        logger.info("stopping: running requests may finish within %g s, a second signal ends them", self._drain_timeout)
        for process in draining:
            process.signal(signal.SIGTERM)
        deadline = time.monotonic() + self._drain_timeout + _STOP_SECONDS
        try:
            while any(p.alive for p in draining) and time.monotonic() < deadline:
                self._turn(deadline, may_end=draining)
        except StopRequested:
            logger.info("stopping at once")
        except LauncherError as error:
            self._announce(str(error))
            raise
        failed = [p for p in draining if not p.alive and p.exit_code]
        if failed:
            raise LauncherError("process_died", "\n".join(p.death() for p in failed))

    def _announce(self, message: str) -> None:
        """Tell the processes with clients why their requests end, and wait for those to have passed it on."""
        telling = [p for p in self.processes if p.spec.drains and p.is_ready and p.alive]
        for process in telling:
            process.send(control.GroupFailed(message))
        self._wait_for(telling, _STOP_SECONDS)

    def _end_all(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes:
                if process.alive:
                    process.signal(number)
            self._wait_for(self.processes, _STOP_SECONDS)
        for process in self.processes:
            if process.alive:
                logger.error("%s (pid %d) does not even end when killed: see dmesg", process.spec.name, process.pid)
            process.close()
        self._selector.close()

    def _wait_for(self, processes: Sequence[Process], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(p.alive for p in processes) and (left := deadline - time.monotonic()) > 0:
            self._dispatch(left)

    def _turn(self, deadline: float | None, may_end: Sequence[Process] = ()) -> None:
        """Wait for something to happen, until `deadline` (monotonic seconds) at most, and handle it.

        Raises StopRequested for a new signal, LauncherError when a process that is not in `may_end` has ended.
        """
        self._dispatch(None if deadline is None else max(0.0, deadline - time.monotonic()))
        dead = [p for p in self.processes if not p.alive and p not in may_end]
        if dead:
            raise LauncherError("process_died", "\n".join(process.death() for process in dead))
        if self._signals > self._signals_obeyed:
            self._signals_obeyed = self._signals
            raise StopRequested

    def _dispatch(self, seconds: float | None) -> None:
        for key, _ in self._selector.select(seconds):
            key.data()

    @contextmanager
    def _signals_as_events(self) -> Iterator[None]:
        """Signals write a byte to a pipe that the selector watches; the handlers themselves do nothing."""
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(reader, selectors.EVENT_READ, lambda: self._read_signals(reader))
        numbers = (*_STOP_SIGNALS, signal.SIGCHLD)
        handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
        previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(previous)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.close(reader)
            os.close(writer)

    def _read_signals(self, reader: int) -> None:
        self._signals += sum(number in _STOP_SIGNALS for number in os.read(reader, 512))
