"""Compile flashinfer's kernels ahead of time. That needs nvcc, ninja and a C++ compiler, but no GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from minisgl.errors import KernelBuildError
from minisgl.kernels.compile.flashinfer_kernels import FlashInferKernel
from minisgl.kernels.compile.flashinfer_setup import ARCHITECTURE_FILE, architecture_of


def build(kernels: Sequence[FlashInferKernel], out: Path, *, architecture: str, jobs: int | None = None) -> list[Path]:
    """Compile kernels that are missing in `out` for GPUs of `architecture` (`9.0a` is Hopper). Returns new libraries.

    `jobs` compilers run at a time; None: one per core. Raises KernelBuildError.
    """
    missing = [kernel for kernel in kernels if not _library(out, kernel).exists()]
    if any(out.glob("*/*.so")) and (there := architecture_of(out)) != architecture:
        raise KernelBuildError(
            "other_architecture",
            f"{out} has kernels for GPUs of {there}: put those of {architecture} into another folder",
        )
    if not missing:
        return []
    with tempfile.TemporaryDirectory(prefix="minisgl-kernels-") as scratch:
        _prepare(Path(scratch), architecture, jobs)
        try:
            from flashinfer.jit import build_jit_specs
        except ImportError as error:
            raise KernelBuildError(
                "no_flashinfer", f"flashinfer cannot be imported ({error}); install the cuda extra"
            ) from error
        specifications = [kernel.specification() for kernel in missing]
        assert [each.name for each in specifications] == [kernel.name for kernel in missing]
        try:
            build_jit_specs(specifications, verbose=True, skip_prebuilt=False)
        except (RuntimeError, subprocess.CalledProcessError) as error:
            raise KernelBuildError("compilation_failed", f"a kernel does not compile: {error}") from error
        out.mkdir(parents=True, exist_ok=True)
        (out / ARCHITECTURE_FILE).write_text(architecture)
        return [_install(each, kernel, out) for each, kernel in zip(specifications, missing, strict=True)]


def _library(out: Path, kernel: FlashInferKernel) -> Path:
    return out / kernel.name / f"{kernel.name}.so"


def _install(specification: Any, kernel: FlashInferKernel, out: Path) -> Path:
    library = _library(out, kernel)
    library.parent.mkdir(parents=True, exist_ok=True)
    partial = library.with_suffix(".partial")
    shutil.copyfile(specification.jit_library_path, partial)
    os.replace(partial, library)
    return library


def _prepare(scratch: Path, architecture: str, jobs: int | None) -> None:
    """Environment variables that flashinfer reads on import. Raises KernelBuildError."""
    toolkit = _toolkit()
    for tool in ("ninja", "g++"):
        if shutil.which(tool) is None:
            raise KernelBuildError("no_compiler", f"{tool} is not here, which compiling kernels needs: install it")
    # torch's wheels contain headers and libraries of CUDA that the compiler alone lacks.
    wheels = Path(torch.__file__).parents[1] / "nvidia" / "cu13"
    _make_linkable(scratch, wheels / "lib")
    os.environ |= {
        "CUDA_HOME": str(toolkit),
        "FLASHINFER_WORKSPACE_BASE": str(scratch),
        "FLASHINFER_CUDA_ARCH_LIST": architecture,
        "FLASHINFER_EXTRA_CFLAGS": f"-isystem {wheels}/include",
        "FLASHINFER_EXTRA_CUDAFLAGS": f"-isystem {wheels}/include",
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{scratch}",
    }
    os.environ.pop("FLASHINFER_DISABLE_JIT", None)
    if jobs is not None:
        os.environ["MAX_JOBS"] = str(jobs)


def _toolkit() -> Path:
    """Folder of the CUDA toolkit: from the environment, of nvcc on the path, or among Python's packages."""
    named, found = os.environ.get("CUDA_HOME"), shutil.which("nvcc")
    candidates = [
        *([Path(named)] if named else []),
        *([Path(found).resolve().parents[1]] if found else []),
        Path(torch.__file__).parents[1] / "nvidia" / "cu13",
    ]
    for folder in candidates:
        if (folder / "bin" / "nvcc").is_file():
            return folder
    raise KernelBuildError(
        "no_nvcc",
        "nvcc is not here, which compiling kernels needs: install the CUDA toolkit 13, or "
        "`pip install 'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-cccl==13.0.*'`, or name its folder in CUDA_HOME",
    )


def _make_linkable(scratch: Path, libraries: Path) -> None:
    """Put into `scratch` the libraries that the linker needs: an empty one for the driver, which only machines with a
    GPU have, and the `libraries` of CUDA under names without a version."""
    driver = str(scratch / "libcuda.so")
    subprocess.run(["gcc", "-shared", "-x", "c", "/dev/null", "-o", driver, "-Wl,-soname,libcuda.so.1"], check=True)
    for library in libraries.glob("*.so.*"):
        (scratch / f"{library.name.partition('.so')[0]}.so").symlink_to(library)
