"""Our own kernels compiled ahead of time: which ones an engine will launch, and that a launch finds them."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime.build import compile_module_from_src

from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.cli.main import main
from minisgl.config import EngineConfig
from minisgl.engine.start import rehearsal
from minisgl.engine.start.rehearsal import rehearse
from minisgl.kernels.build.triton import Architecture, Launches, _no_device, modules_apart
from minisgl.kernels.compile.flashinfer_setup import KERNELS_DIR
from minisgl.kernels.compile.triton_cache import SUBFOLDER, use_built_kernels
from minisgl.models.config import ModelConfig
from minisgl.toy.tiny import write_tiny_checkpoint

HOPPER = Architecture.parse("9.0a")
FEW_ROWS = EngineConfig(model="", device="cuda", max_running=8)


@triton.jit
def _double(x, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at, at < count), at < count)


def _launch(count: int, offset: int = 0) -> None:
    x = torch.empty(count + offset, dtype=torch.bfloat16, device="cuda")[offset:]
    _double[(1,)](x, torch.empty_like(x), count, BLOCK=64)


def test_missing_tools_are_named_before_compilation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    for compiler, words in (("true", "install them (Debian: libpython3-dev)"), ("no-such-compiler", "install gcc")):
        monkeypatch.setenv("CC", compiler)
        assert main(["kernels", "build", "qwen3-0.6b", "--out", str(tmp_path / "built")]) == 1
        assert words in capsys.readouterr().err
    assert not (tmp_path / "built").exists()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="Triton needs a C compiler")
def test_threads_get_the_launchers_of_their_own_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    source = """
        #include <Python.h>
        static PyObject *number(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
        static PyMethodDef methods[] = {{"number", number, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
        static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
        PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&module); }
    """

    def load(number: int) -> int:
        found: int = compile_module_from_src(source % number, "__triton_launcher").number()
        return found

    assert [load(number) for number in range(4)] == [0, 1, 2, 3]
    expected = [number % 4 for number in range(600)]
    # Threads change between any two instructions.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with modules_apart(), ThreadPoolExecutor(4) as threads:
            assert list(threads.map(load, expected)) == expected
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="Triton needs a C compiler")
def test_modules_link_the_driver_with_linkers_that_drop_unused_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nexec gcc -Wl,--as-needed "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    launches = Launches()
    with launches.recorded(HOPPER):
        _launch(32)
    launches.compile(tmp_path / "built", HOPPER, jobs=1)
    modules = list((tmp_path / "built").rglob("*.so"))
    assert len(modules) == 2
    for module in modules:
        assert b"\0libcuda.so.1\0" in module.read_bytes(), module.name


@pytest.mark.skipif(shutil.which("gcc") is None, reason="Triton needs a C compiler")
def test_a_launch_finds_kernels_compiled_ahead_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    with launches.recorded(HOPPER):
        _launch(48)
        _launch(96)
    assert len(launches) == 1, "both counts are multiples of 16"
    launches.compile(tmp_path / "built", HOPPER, jobs=1)
    # As an image is: made in one place, used in another.
    (tmp_path / "built").rename(tmp_path / "moved")
    assert [entry.name for entry in (tmp_path / "moved").iterdir()] == [SUBFOLDER]

    monkeypatch.setenv(KERNELS_DIR, str(tmp_path / "moved"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "own"))
    # Remembered, whatever it is, and then set by the code itself.
    monkeypatch.setenv("TRITON_CACHE_MANAGER", "")
    del os.environ["TRITON_CACHE_MANAGER"]
    use_built_kernels()
    hits: list[bool] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, cache_hit, **_: hits.append(cache_hit))
    with _no_device(HOPPER):
        for count in (48, 47):
            kernel: Any = _double.warmup(torch.bfloat16, torch.bfloat16, count, BLOCK=64, grid=(1,))
            assert kernel.asm["cubin"]
    assert hits == [True, False], "47 is no multiple of 16: another kernel, which is compiled then"


def test_alignment_of_slices_is_part_of_the_name() -> None:
    launches = Launches()
    with launches.recorded(HOPPER):
        for offset in (0, 8, 3):
            _launch(48, offset)
    assert len(launches) == 2


@pytest.mark.parametrize("arch", ["qwen3", "qwen3-moe"])
def test_rehearsal_launches_the_kernels_of_an_engine(arch: str, tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, arch, hidden=256, heads=4, kv_heads=2, head_dim=128)
    launches = Launches()
    with launches.recorded(HOPPER):
        rehearse(ModelConfig.read(folder), msgspec.structs.replace(FEW_ROWS, tensor_parallel=2))
    names = {name.rpartition(".")[2] for name, _ in launches.keys}
    assert {"_step_inputs", "_sample_part", "_sample_row", "_add_rms_norm", "_all_reduce"} <= names
    assert {"scan_logits", "sample_candidates", "sample_whole_rows", "report_logprobs"} <= names
    if arch == "qwen3-moe":
        assert {"_route", "_pairs_of_experts", "_weighted_sum"} <= names
        kernels = {name for name, _ in launches.keys}
        for module in ("grouped_gemm_triton", "gemv_gluon"):
            assert {f"minisgl.kernels.experts.{module}._gate_up", f"minisgl.kernels.experts.{module}._down"} <= kernels


@pytest.mark.parametrize("arch", ["qwen3", "qwen3-moe"])
def test_rehearsal_of_representative_layers_launches_the_kernels_of_all_layers(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig.read(write_tiny_checkpoint(tmp_path, arch, layers=4, head_dim=128))
    launches = Launches()
    with launches.recorded(HOPPER):
        rehearse(config, FEW_ROWS)
    few = len(launches)
    monkeypatch.setattr(rehearsal, "representative_layers", lambda layers: list(range(len(layers))))
    with launches.recorded(HOPPER):
        rehearse(config, FEW_ROWS)
    assert len(launches) == few


_kernels: list[Any] = []
"""In a process of its own."""


def _names(order: int) -> dict[str, str]:
    return {f"{kernel.fn.__module__}.{kernel.fn.__qualname__}": kernel.cache_key for kernel in _kernels[::order]}


@pytest.mark.parametrize(
    ("model", "quantization"),
    [*product(("qwen3-30b-a3b",), (None, "fp8-block", "int4")), ("gpt-oss-20b", None)],
)
def test_the_name_of_a_kernel_does_not_depend_on_earlier_compilations(model: str, quantization: str | None) -> None:
    """Triton leaves the constants of a function that two kernels call out of the name of the one that is first. The
    kernels of models without experts are among those of models with them."""
    _kernels.clear()
    given = BUILTIN_CONFIGS[model]
    few = {**given, "num_hidden_layers": 2, "layer_types": given["layer_types"][:2] if "layer_types" in given else None}
    config = ModelConfig.parse(few, quantization=quantization)
    launches = Launches()
    with launches.recorded(HOPPER):
        rehearse(config, FEW_ROWS)
    # By identity: a kernel's hash is that of its name, and a process keeps the name that it has once given.
    kernels = list({id(kernel): kernel for kernel, _ in launches._by_key.values()}.values())
    # Forked: no message takes a kernel to another process.
    with get_context("fork").Pool(1, _kernels.extend, (kernels,), maxtasksperchild=1) as pool:
        forwards, backwards = (pool.apply(_names, (order,)) for order in (1, -1))
    assert len(forwards) > 5
    assert forwards == backwards
