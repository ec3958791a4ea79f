"""Kernels that are compiled, with compilations that Triton and flashinfer would report."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import triton

from minisgl.kernels.compile.compile_log import CompileLog


def compiled(name: str = "_norm", *, width: str = "i32", aligned: bool = True, block: int = 64) -> Any:
    """Triton's description of a kernel."""
    return SimpleNamespace(
        name=name,
        signature={"x": "*bf16", "width": width, "BLOCK": "constexpr"},
        attrs={(0,): [["tt.divisibility", 16]]} if aligned else {},
        constants={(2,): block},
    )


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Function that reports kernels of Triton to the log that watches it."""
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    return lambda source, *, cache_hit: triton.knobs.compilation.listener(src=source, cache_hit=cache_hit, times=None)


def test_kernels_of_the_start_are_counted_without_a_warning(report: Any, caplog: pytest.LogCaptureFixture) -> None:
    log = CompileLog()
    log.watch_triton()
    report(compiled(), cache_hit=False)
    report(compiled("_other"), cache_hit=True)
    assert log.compiled == ["_norm"]
    assert not caplog.records


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"name": "_new"}, "it was not launched during the start"),
        ({"aligned": False}, "x is *bf16, not *bf16 divisible by 16"),
        ({"block": 256}, "BLOCK is 256, not 64"),
        ({"block": 128, "width": "i64"}, "width is i64, not i32"),
        ({}, "its options differ"),
    ],
)
def test_a_kernel_that_is_compiled_while_serving_is_a_warning_with_what_is_new(
    changes: dict[str, Any], cause: str, report: Any, caplog: pytest.LogCaptureFixture
) -> None:
    log, counted = CompileLog(), []
    log.watch_triton()
    report(compiled(), cache_hit=False)
    report(compiled(block=128), cache_hit=True)
    log.begin_serving(lambda: counted.append(1))
    report(compiled(**changes), cache_hit=False)
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    name = changes.get("name", "_norm")
    assert warning.getMessage() == f"kernel {name} was compiled while serving, which delays requests: {cause}"
    assert len(counted) == 1


def test_a_kernel_that_a_cache_has_is_not_counted(report: Any, caplog: pytest.LogCaptureFixture) -> None:
    log, counted = CompileLog(), []
    log.watch_triton()
    log.begin_serving(lambda: counted.append(1))
    with caplog.at_level(logging.INFO):
        report(compiled(), cache_hit=True)
    assert not counted
    assert caplog.messages == ["kernel _norm was loaded while serving: it was not launched during the start"]


def test_a_library_that_flashinfer_compiles_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = tmp_path / "batch_prefill.so"

    class JitSpec:
        name = "batch_prefill"
        jit_library_path = library

        def build(self, verbose: bool, need_lock: bool = True) -> None:
            # As ninja: what exists is up to date.
            if not library.exists():
                library.touch()

    core = ModuleType("flashinfer.jit.core")
    core.JitSpec = JitSpec  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer.jit.core", core)
    log, counted = CompileLog(), []
    log.watch_flashinfer()
    log.begin_serving(lambda: counted.append(1))
    JitSpec().build(verbose=False)
    JitSpec().build(verbose=False, need_lock=False)
    assert (log.compiled, len(counted)) == (["batch_prefill"], 1)
    assert "flashinfer had no such library" in caplog.text
