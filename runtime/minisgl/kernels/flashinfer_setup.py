"""flashinfer, with kernels that were compiled ahead of time where there are such."""

from __future__ import annotations

import importlib
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

KERNELS_DIR: Final = "MINISGL_KERNELS_DIR"
"""Environment variable: folder of kernels compiled ahead of time, one sub-folder per kernel as flashinfer names it.
Where it is set nothing is compiled, so that a missing kernel is an error and not a wait of minutes."""

_DTYPE_NAMES: Final = {torch.bfloat16: "bf16", torch.float16: "f16"}


@cache
def load_flashinfer() -> Any:
    """The flashinfer module. Raises ImportError."""
    # flashinfer reads these when it is imported. Its norms would otherwise try a compiler that we do not depend on.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    folder = os.environ.get(KERNELS_DIR)
    if folder:
        os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")
        os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    flashinfer = importlib.import_module("flashinfer")
    if folder:
        environment: Any = importlib.import_module("flashinfer.jit.env")
        environment.FLASHINFER_AOT_DIR = Path(folder)
    return flashinfer


def why_not_flashinfer(dtype: torch.dtype, kernel: str) -> str | None:
    """Why flashinfer cannot run `kernel` here (None: it can). `kernel` is the beginning of the folder's name among the
    kernels compiled ahead of time, in which {t} stands for the name of `dtype`."""
    if dtype not in _DTYPE_NAMES:
        return f"it computes in bfloat16 or float16, not in {str(dtype).removeprefix('torch.')}"
    try:
        load_flashinfer()
    except ImportError as error:
        return f"flashinfer cannot be imported ({error}); install the cuda extra"
    folder = os.environ.get(KERNELS_DIR)
    prefix = kernel.format(t=_DTYPE_NAMES[dtype])
    if folder and not any(Path(folder).glob(f"{prefix}*/*.so")):
        return f"{folder} ({KERNELS_DIR}) has no kernel {prefix}…"
    if not folder and shutil.which("nvcc") is None and "CUDA_HOME" not in os.environ:
        return f"its kernels must be compiled but nvcc is not here; install it or set {KERNELS_DIR}"
    return None
