"""Import of flashinfer, with kernels that were compiled ahead of time if present."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

from minisgl.kernels.compile.flashinfer_kernels import DTYPE_NAMES, FlashInferKernel

KERNELS_DIR: Final = "MINISGL_KERNELS_DIR"
"""Environment variable: folder of kernels compiled ahead of time, one sub-folder per kernel as flashinfer names it.
If it is set nothing is compiled: a missing kernel is an error instead of a wait of minutes."""
ARCHITECTURE_FILE: Final = "flashinfer-architecture"
"""File in that folder that names the architecture of flashinfer's kernels."""


@cache
def load_flashinfer() -> Any:
    """The flashinfer package, with its modules `decode` and `prefill`. Raises ImportError."""
    # flashinfer reads these on import. Otherwise its norms require a compiler that we do not depend on.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    folder = os.environ.get(KERNELS_DIR)
    if folder:
        os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")
        os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", architecture_of(Path(folder)))
    flashinfer = lean_package("flashinfer")
    if folder:
        environment: Any = importlib.import_module("flashinfer.jit.env")
        environment.FLASHINFER_AOT_DIR = Path(folder)
    for module in ("decode", "prefill"):
        importlib.import_module(f"flashinfer.{module}")
    return flashinfer


def architecture_of(folder: Path) -> str:
    """Architecture of flashinfer's kernels in `folder`, such as `9.0a`."""
    file = folder / ARCHITECTURE_FILE
    # A folder that has none of its kernels has no such file.
    return file.read_text().strip() if file.is_file() else "9.0a"


def why_not_flashinfer(kernel: FlashInferKernel) -> str | None:
    """Reason why flashinfer cannot run `kernel` here, or None."""
    if kernel.dtype not in DTYPE_NAMES:
        return f"it computes in bfloat16 or float16, not in {str(kernel.dtype).removeprefix('torch.')}"
    try:
        load_flashinfer()
    except ImportError as error:
        return f"flashinfer cannot be imported ({error}); install the cuda extra"
    folder = os.environ.get(KERNELS_DIR)
    if folder and not (Path(folder) / kernel.name / f"{kernel.name}.so").is_file():
        return f"{folder} ({KERNELS_DIR}) has no kernel {kernel.name}: minisgl kernels build MODEL puts it there"
    if folder and not _runs(architecture_of(Path(folder)), torch.cuda.get_device_capability()):
        return (
            f"the kernels in {folder} ({KERNELS_DIR}) are for GPUs of {architecture_of(Path(folder))}, not for this one"
        )
    if not folder and shutil.which("nvcc") is None and "CUDA_HOME" not in os.environ:
        return f"its kernels must be compiled but nvcc is not here; install it or set {KERNELS_DIR}"
    return None


def _runs(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether a GPU runs code compiled for `architecture` without PTX: with an `a` at the end only exactly that
    architecture, otherwise also later ones of its generation."""
    major, minor = map(int, architecture.rstrip("af").split("."))
    if architecture.endswith("a"):
        return capability == (major, minor)
    return capability[0] == major and capability[1] >= minor


def lean_package(name: str) -> ModuleType:
    """Make modules of the package `name` importable without its __init__, which may import hundreds of others for
    seconds; it runs on first access to an attribute. Raises ImportError if there is no such package."""
    known = sys.modules.get(name)
    if known is not None:
        return known
    specification = importlib.util.find_spec(name)
    if specification is None or specification.loader is None:
        raise ImportError(f"there is no package {name}")
    loader = specification.loader
    package: Any = importlib.util.module_from_spec(specification)

    def rest(attribute: str) -> Any:
        # The import system probes attributes before it imports a module: that must not run the __init__.
        if attribute.startswith("__") or importlib.util.find_spec(f"{name}.{attribute}") is not None:
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        del package.__getattr__
        loader.exec_module(package)
        return getattr(package, attribute)

    package.__getattr__ = rest
    sys.modules[name] = package
    return sys.modules[name]
