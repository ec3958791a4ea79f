"""Heartbeats of a rank: a thread reports the age of the current step to the launcher.

The thread runs while the step waits for its device, because such waits release the interpreter lock. If the lock is
never released, or the process is stopped, no heartbeat arrives, which the launcher notices as well.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Final, Protocol

HEARTBEAT_SECONDS: Final = 1.0

MAX_GAP_SECONDS: Final = 5.0
"""Most time that counts between two looks at a clock. A longer gap means that the process itself did not run: it was
stopped, its container was frozen or its machine slept, and so did what it looks at."""

_COMPUTING: Final = 0.1
"""CPU seconds per second from which a process computes. One that waits needs about a thousandth."""

_COMPILERS: Final = frozenset(
    {
        ("triton.compiler.compiler", "compile"),
        ("flashinfer.jit.core", "build"),
        ("flashinfer.jit.cpp_ext", "run_ninja"),
    }
)
"""Module and name of the functions that compile kernels."""


class BusySince(Protocol):
    """An engine as its watcher sees it: `engine.watched_engine.WatchedEngine`."""

    @property
    def busy_since(self) -> float | None: ...


class StepAge:
    """Seconds that the current step has lasted, from samples. Pure.

    Time in which the process did not run does not count, nor do compilers. On a CPU, a step that computes may only be
    long, so it counts as hung only while the process uses no CPU time.
    """

    def __init__(self, *, on_cpu: bool, now: float, cpu_seconds: float) -> None:
        self._on_cpu = on_cpu
        self._now, self._cpu_seconds = now, cpu_seconds
        self._since: float | None = None
        self._age = 0.0

    def sample(self, now: float, busy_since: float | None, cpu_seconds: float, *, compiling: bool) -> float:
        """Return the age at `now`; 0: no step. `busy_since` is the begin of the step, `cpu_seconds` the CPU time of the
        process since its start."""
        passed = now - self._now
        computing = self._on_cpu and cpu_seconds - self._cpu_seconds > _COMPUTING * passed
        self._now, self._cpu_seconds = now, cpu_seconds
        if busy_since is None or computing or compiling:
            self._age = 0.0
        elif busy_since == self._since:
            self._age += min(passed, MAX_GAP_SECONDS)
        else:
            self._age = min(now - busy_since, passed, MAX_GAP_SECONDS)
        self._since = busy_since
        return self._age


def start_heartbeats(
    engine: BusySince, send: Callable[[float], None], *, on_cpu: bool, interval: float = HEARTBEAT_SECONDS
) -> None:
    """Call `send` with the age of the current step once here, and then every `interval` seconds on a daemon thread.
    Call it on the thread that runs the steps."""
    runner = threading.get_ident()
    age = StepAge(on_cpu=on_cpu, now=time.monotonic(), cpu_seconds=time.process_time())

    def report() -> None:
        while True:
            time.sleep(interval)
            compiling = engine.busy_since is not None and _compiles(sys._current_frames().get(runner))
            send(age.sample(time.monotonic(), engine.busy_since, time.process_time(), compiling=compiling))

    send(0.0)
    threading.Thread(target=report, name="heartbeats", daemon=True).start()


def _compiles(frame: FrameType | None) -> bool:
    """Return whether a frame, or one that called it, is that of a compiler."""
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _COMPILERS:
            return True
        frame = frame.f_back
    return False
