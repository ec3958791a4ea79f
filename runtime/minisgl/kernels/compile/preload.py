"""Import packages with kernels in the background: flashinfer alone takes seconds, and so may hashing Triton's compiler,
which is part of the name of every kernel in its cache."""

from __future__ import annotations

import importlib
import os
from concurrent.futures import ThreadPoolExecutor, wait

from minisgl.kernels.compile.compile_log import CompileLog
from minisgl.kernels.compile.flashinfer_setup import KERNELS_DIR, load_flashinfer


class Preload:
    """Starts on creation. Import errors are left to the code that needs the package."""

    def __init__(self, log: CompileLog) -> None:
        self._log = log
        self._pool = ThreadPoolExecutor(thread_name_prefix="preload")
        self._running = [self._pool.submit(self._libraries), self._pool.submit(self._triton)]

    def finish(self) -> None:
        """Wait for the imports."""
        wait(self._running)
        self._pool.shutdown()

    def _triton(self) -> None:
        importlib.import_module("minisgl.kernels.compile.triton_cache").use_built_kernels()
        self._log.watch_triton()
        importlib.import_module("triton.runtime.cache").triton_key()

    def _libraries(self) -> None:
        # In sequence: both import modules of torch that refer to each other, which can deadlock two threads.
        load_flashinfer()
        if not os.environ.get(KERNELS_DIR):
            self._log.watch_flashinfer()
        importlib.import_module("fa3_fwd._C")
