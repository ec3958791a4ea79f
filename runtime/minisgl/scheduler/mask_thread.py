"""Threads that fill the masks of a launched step while the loop plans and launches the next one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

import msgspec

Task = Callable[[], None]


class _Wake:
    """Takes the place of a task, and is none."""


_WAKE: Final = _Wake()


class _Shared(msgspec.Struct):
    """State of the thread, which does not refer to its owner: the thread ends when the owner is dropped."""

    tasks: SimpleQueue[Task | _Wake | None]
    begun: threading.Lock
    done: threading.Lock
    error: BaseException | None = None


class MaskThread:
    """Runs one task at a time. The thread starts with the first task."""

    def __init__(self) -> None:
        self._shared: _Shared | None = None

    def wake(self) -> None:
        """Wake the thread for a task that `start` will soon give it: it then waits only for the interpreter lock."""
        if self._shared is not None:
            self._shared.tasks.put(_WAKE)

    def start(self, task: Task) -> None:
        """Start a task, after `join` of the one before. It has begun when this returns, since a thread that only waits
        for the interpreter lock may wait for milliseconds."""
        if self._shared is None:
            self._shared = _Shared(SimpleQueue(), _locked(), _locked())
            threading.Thread(target=_run, args=(self._shared,), name="masks", daemon=True).start()
        self._shared.tasks.put(task)
        self._shared.begun.acquire()

    def join(self) -> None:
        """Wait for the task that was started. Raises its exception."""
        shared = self._shared
        assert shared is not None
        shared.done.acquire()
        error, shared.error = shared.error, None
        if error is not None:
            raise error

    def __del__(self) -> None:
        if self._shared is not None:
            self._shared.tasks.put(None)


def _locked() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _run(shared: _Shared) -> None:
    while (task := shared.tasks.get()) is not None:
        if isinstance(task, _Wake):
            continue
        shared.begun.release()
        try:
            task()
        except BaseException as error:
            shared.error = error
        # Before the next `get`, which may be long in coming.
        del task
        shared.done.release()
