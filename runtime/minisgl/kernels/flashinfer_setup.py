"""flashinfer, with kernels that were compiled ahead of time where there are such."""

from __future__ import annotations

import importlib
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any, Final

from minisgl.kernels.flashinfer_kernels import DTYPE_NAMES, FlashInferKernel
from minisgl.kernels.lean_import import lean_package

KERNELS_DIR: Final = "MINISGL_KERNELS_DIR"
"""Environment variable: folder of kernels compiled ahead of time, one sub-folder per kernel as flashinfer names it.
Where it is set nothing is compiled, so that a missing kernel is an error and not a wait of minutes."""


@cache
def load_flashinfer() -> Any:
    """The flashinfer package, with its modules `decode` and `prefill`. Raises ImportError."""
    # flashinfer reads these when it is imported. Its norms would otherwise try a compiler that we do not depend on.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    folder = os.environ.get(KERNELS_DIR)
    if folder:
        os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")
        os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    flashinfer = lean_package("flashinfer")
    if folder:
        environment: Any = importlib.import_module("flashinfer.jit.env")
        environment.FLASHINFER_AOT_DIR = Path(folder)
    for module in ("decode", "prefill"):
        importlib.import_module(f"flashinfer.{module}")
    return flashinfer


def why_not_flashinfer(kernel: FlashInferKernel) -> str | None:
    """Why flashinfer cannot run `kernel` here; None: it can."""
    if kernel.dtype not in DTYPE_NAMES:
        return f"it computes in bfloat16 or float16, not in {str(kernel.dtype).removeprefix('torch.')}"
    try:
        load_flashinfer()
    except ImportError as error:
        return f"flashinfer cannot be imported ({error}); install the cuda extra"
    folder = os.environ.get(KERNELS_DIR)
    if folder and not (Path(folder) / kernel.name / f"{kernel.name}.so").is_file():
        return f"{folder} ({KERNELS_DIR}) has no kernel {kernel.name}: minisgl kernels build MODEL puts it there"
    if not folder and shutil.which("nvcc") is None and "CUDA_HOME" not in os.environ:
        return f"its kernels must be compiled but nvcc is not here; install it or set {KERNELS_DIR}"
    return None
