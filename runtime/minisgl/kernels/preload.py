"""Import packages with kernels in the background: flashinfer alone takes seconds, and so may hashing Triton's compiler,
which is part of the name of every kernel in its cache."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from minisgl.kernels.flashinfer_setup import load_flashinfer


class Preload:
    """Starts on creation. Import errors are left to the code that needs the package."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        """Names of our own kernels that were compiled since, because they were not compiled ahead of time."""
        self._pool = ThreadPoolExecutor(thread_name_prefix="preload")
        self._running = [self._pool.submit(_libraries), self._pool.submit(self._triton)]

    def finish(self) -> None:
        """Wait for the imports."""
        wait(self._running)
        self._pool.shutdown()

    def _triton(self) -> None:
        triton: Any = importlib.import_module("triton")
        importlib.import_module("minisgl.kernels.triton_cache").use_built_kernels()
        triton.knobs.compilation.listener = self._on_kernel
        importlib.import_module("triton.runtime.cache").triton_key()

    def _on_kernel(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            self.compiled.append(src.name)


def _libraries() -> None:
    # In sequence: both import modules of torch that refer to each other, which can deadlock two threads.
    load_flashinfer()
    importlib.import_module("fa3_fwd._C")
