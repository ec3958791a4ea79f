"""The engine's dependencies for machines without a GPU: 1.4 GB where the real ones have 5.

There is no CPU build of this torch for Linux on x86-64 among Python's packages. libtorch needs the CUDA libraries in
order to load, not in order to compute on a CPU: three small ones are kept, the others are stubs in which each name
that libtorch wants is there, and aborts when it is called. Triton and the GPU kernels are left out. A means for
tests, never for an image that users get.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from cluster.places import shell

LOCK: Final = Path(__file__).parents[2] / "images/engine/requirements.lock"
_KEPT: Final = ("nvidia-cuda-runtime", "nvidia-cuda-cupti", "nvidia-cufile")
_LEFT_OUT: Final = ("nvidia-", "cuda-", "nccl", "triton", "flashinfer", "fa3-fwd", "apache-tvm-ffi", "ninja", "einops")
_STUBS: Final = {
    "libcublas.so.13": "cublas",
    "libcublasLt.so.13": "cublasLt",
    "libcudnn.so.9": "cudnn",
    "libcufft.so.12": "cufft",
    "libcurand.so.10": "curand",
    "libcusolver.so.12": "cusolver",
    "libcusparse.so.12": "cusparse",
    "libcusparseLt.so.0": "cusparseLt",
    "libnccl.so.2": "p?nccl",
    "libnvrtc.so.13": "nvrtc",
    "libnvshmem_host.so.3": "nvshmem",
}
"""Library: how the names in it begin."""
_UNUSED: Final = ("torch/include", "torch/test", "torch/share", "torch/bin/protoc*")


def requirements() -> str:
    """The engine's locked requirements less what only a GPU needs."""
    entries = re.split(r"\n(?=\S)", LOCK.read_text())
    kept = [e for e in entries if not e.startswith(_LEFT_OUT) or e.startswith(tuple(f"{k}==" for k in _KEPT))]
    return "\n".join(kept) + "\n"


def install(site: Path, lock: Path) -> None:
    """Fill an empty directory with what `requirements` names, from a file that holds it."""
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
    # The image's Python, whatever runs this.
    command += ["--python-version", "3.11", "--link-mode", "copy", "--target", str(site), "-r", str(lock)]
    shell(*command)
    for path in (found for pattern in _UNUSED for found in site.glob(pattern)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    _write_stubs(site / "torch/lib")


def _write_stubs(directory: Path) -> None:
    wanted: set[str] = set()
    for library in directory.glob("*.so*"):
        listed = shell("nm", "-D", "--undefined-only", library).stdout
        wanted |= {re.sub("@.*", "", line.split()[-1]) for line in listed.splitlines()}
    for library_name, prefix in _STUBS.items():
        names = sorted(name for name in wanted if re.fullmatch(prefix + r"\w*", name))
        code = "#include <stdlib.h>\n" + "".join(f"void {name}(void) {{ abort(); }}\n" for name in names)
        compiler = ["gcc", "-w", "-fno-builtin", "-shared", "-fPIC", "-O1", "-s", "-xc", "-"]
        compiler += [f"-Wl,-soname,{library_name}", "-o", str(directory / library_name)]
        subprocess.run(compiler, input=code, text=True, check=True)
