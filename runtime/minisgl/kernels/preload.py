"""Import what brings kernels beside other work: flashinfer alone takes seconds, and so may hashing Triton's compiler,
which is part of the name of every kernel in its cache."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from minisgl.kernels.flashinfer_setup import load_flashinfer


class Preload:
    """Begins at once. What cannot be imported is left for those to say who need it."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        """Names of our own kernels that were compiled since, because they were not ahead of time."""
        self._pool = ThreadPoolExecutor(thread_name_prefix="preload")
        self._running = [self._pool.submit(_libraries), self._pool.submit(self._triton)]

    def finish(self) -> None:
        """Wait until all is imported."""
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
    # One after the other: modules of torch that both import refer to each other, and two threads could meet in them.
    load_flashinfer()
    importlib.import_module("fa3_fwd_interface")
