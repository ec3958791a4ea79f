"""Compile our own kernels ahead of time, without a GPU.

The code that launches kernels runs unchanged on tensors without memory. Triton's hook reports the kernel of each launch
with the types and alignments that determine its name in the cache. So the compiled kernels are those that launches look
up, as long as the code is the same.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build as c_modules
from triton.runtime.driver import driver

from minisgl import hopper
from minisgl.errors import KernelBuildError
from minisgl.kernels.compile.triton_cache import SUBFOLDER

_MULTIPROCESSORS: Final = {9: hopper.MULTIPROCESSORS}
"""Multiprocessors of server GPUs, by the major number of the architecture."""


@dataclass(frozen=True)
class Architecture:
    major: int
    minor: int
    multiprocessors: int

    @staticmethod
    def parse(text: str) -> Architecture:
        """Parse `9.0` or `9.0a`. Raises ValueError."""
        major, minor = text.rstrip("af").split(".")
        return Architecture(int(major), int(minor), _MULTIPROCESSORS.get(int(major), 1))

    @staticmethod
    def of(device: torch.device) -> Architecture:
        """Architecture of a GPU of this machine."""
        properties = torch.cuda.get_device_properties(device)
        return Architecture(properties.major, properties.minor, properties.multi_processor_count)

    @property
    def target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * self.major + self.minor, 32)


class Launches:
    """Launched kernels, each once."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, str], _Launch] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def keys(self) -> set[tuple[str, str]]:
        """Function and specialization of each kernel, as Triton tells kernels apart."""
        return set(self._by_key)

    @contextmanager
    def recorded(self, architecture: Architecture) -> Iterator[None]:
        """Context in which tensors have no memory, `cuda` is a GPU of `architecture`, and launches are only
        recorded."""

        def note(*, key: str, fn: Any, compile: Mapping[str, Any], **_: Any) -> bool:
            self._by_key[f"{fn.module}.{fn.name}", key] = fn.jit_function, compile["specialization_data"]
            # Nothing is compiled or launched.
            return True

        properties = SimpleNamespace(
            major=architecture.major,
            minor=architecture.minor,
            multi_processor_count=architecture.multiprocessors,
        )
        with ExitStack() as stack:
            stack.enter_context(_no_device(architecture))
            for owner, name, value in (
                (triton.knobs.runtime, "jit_cache_hook", note),
                (torch.cuda, "get_device_capability", lambda device=None: (properties.major, properties.minor)),
                (torch.cuda, "get_device_properties", lambda device=None: properties),
                # Real allocations are aligned to more than any alignment that Triton specializes on.
                (FakeTensor, "data_ptr", lambda tensor: tensor.storage_offset() * tensor.itemsize),
            ):
                stack.enter_context(replaced(owner, name, value))
            # Inputs that are made on the host have memory, until they are copied.
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(torch.inference_mode())
            yield

    def compile(self, out: Path, architecture: Architecture, jobs: int) -> None:
        """Compile into the Triton folder of `out`, replacing its content. Raises what Triton raises."""
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out, prefix="partial-") as partial, ExitStack() as stack:
            folder = Path(partial) / SUBFOLDER
            _set_variable(stack, "TRITON_CACHE_DIR", str(folder))
            _set_variable(stack, "TRITON_LIBCUDA_PATH", str(_driver_stub(Path(partial))))
            # Triton caches these values; forget them now and afterwards.
            for remembered in (nvidia.libcuda_dirs, nvidia.library_dirs):
                remembered.cache_clear()
                stack.callback(remembered.cache_clear)
            stack.enter_context(_no_device(architecture))
            _build_c_module(nvidia.CudaUtils)
            launches = list(self._by_key.values())
            # Fork: the records refer to functions, which cannot be sent to another process.
            with get_context("fork").Pool(jobs, _take, (launches,)) as pool:
                for _ in pool.imap_unordered(_compile, range(len(launches))):
                    pass
            shutil.rmtree(out / SUBFOLDER, ignore_errors=True)
            folder.rename(out / SUBFOLDER)

    def load(self, device: torch.device) -> None:
        """Compile for a GPU of this process, and load what was compiled, on threads. Raises what Triton raises."""
        launches = list(self._by_key.values())
        for function, _ in launches:
            # Computed here: it caches the names of functions that several kernels call.
            assert function.cache_key
        threads = ThreadPoolExecutor(initializer=lambda: torch.cuda.set_device(device))
        with modules_apart(), threads as pool:
            for _ in pool.map(_load, launches):
                pass


_Launch: TypeAlias = tuple[Any, str]
"""Function of a kernel and its specialization."""

_launches: list[_Launch] = []
"""Compile kernels, in a worker process."""


def check_c_compiler() -> None:
    """Check the C compiler, with which Triton builds a launcher module per kernel. Raises KernelBuildError."""
    if shutil.which(os.environ.get("CC", "gcc")) is None:
        raise KernelBuildError("no_c_compiler", "there is no C compiler: install gcc, or name one in CC")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        raise KernelBuildError(
            "no_python_headers",
            f"Python's headers are not in {headers}: install them (Debian: libpython3-dev), or take a Python that has "
            "them, as Docker's python images do",
        )


def _take(launches: list[_Launch]) -> None:
    _launches.extend(launches)


def _compile(number: int) -> None:
    function, specialization = _launches[number]
    kernel = function.preload(specialization)
    _build_c_module(lambda: nvidia.CudaLauncher(kernel.src, kernel.metadata))


def _load(launch: _Launch) -> None:
    function, specialization = launch
    # Builds the launcher module and loads both.
    assert function.preload(specialization).run


def _build_c_module(build: Callable[[], object]) -> None:
    """Build the C modules that load and launch a kernel."""
    # Without a driver Triton warns that it cannot load the module, but by then it is in the cache.
    logging.getLogger("triton.runtime.build").setLevel(logging.ERROR)
    with suppress(ImportError):
        build()


@contextmanager
def modules_apart() -> Iterator[None]:
    """Context in which several threads may load Triton's C modules.

    All launchers have one module name. Python returns the module that it has under this name, with new content, where
    a file is loaded again, as kernels with equal types do; another thread would take the other kernel's launcher.
    """
    load, lock = c_modules._load_module_from_path, Lock()

    def load_alone(name: str, path: str) -> SimpleNamespace:
        with lock:
            return SimpleNamespace(**vars(load(name, path)))

    with replaced(c_modules, "_load_module_from_path", load_alone):
        yield


@contextmanager
def _no_device(architecture: Architecture) -> Iterator[None]:
    before = driver._active
    # Triton keeps compiled kernels per device, and has none for a new device.
    device = object()
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: device,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: architecture.target,
        )
    )
    try:
        yield
    finally:
        driver.set_active(before)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context in which the attribute `name` of `owner` is `value`."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _set_variable(stack: ExitStack, name: str, value: str) -> None:
    before = os.environ.get(name)
    if before is None:
        stack.callback(os.environ.pop, name)
    else:
        stack.callback(os.environ.__setitem__, name, before)
    os.environ[name] = value


def _driver_stub(scratch: Path) -> Path:
    """Folder of a stub libcuda.so.1 for the linker, since only machines with a GPU have the driver. It defines the
    functions that Triton's modules call, because a linker may drop a library that provides no needed symbol."""
    sources = Path(nvidia.__file__).parent
    text = "".join((sources / name).read_text() for name in ("driver.c", "driver.py"))
    functions = sorted(set(re.findall(r"\bcu[A-Z]\w+", text)))
    command = ["gcc", "-shared", "-x", "c", "-", "-o", str(scratch / "libcuda.so.1")]
    code = "".join(f"void {name}(void) {{}}\n" for name in functions)
    subprocess.run(command, check=True, input=code.encode())
    return scratch
