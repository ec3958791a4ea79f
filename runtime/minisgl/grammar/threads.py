"""Threads for work of the grammar library, which recurses deeply in native code."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

THREADS: Final = 2
_STACK_BYTES: Final = 64 << 20
"""A reference costs the library 16 KiB of stack. The memory is only reserved, and used as far as the stack grows."""


class DeepThreads:
    """A pool of threads with large stacks. They end with the process."""

    def __init__(self, threads: int = THREADS) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="grammar")
        self._starting = threading.Lock()

    def submit(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Run a function that does not itself use these threads."""
        # The pool starts threads within `submit`; the size is a setting of the process.
        with self._starting:
            before = threading.stack_size(_STACK_BYTES)
            try:
                return self._pool.submit(function, *args, **kwargs)
            finally:
                threading.stack_size(before)


deep_threads: Final = DeepThreads()
