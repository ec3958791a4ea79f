from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.attention import (
    balanced_backend,
    cascade_backend,
    flashinfer_backend,
    split_backend,
    xqa_backend,
)
from minisgl.attention.backend import BackendUnavailable
from minisgl.attention.select import select_backends, why_no_fp8
from minisgl.kernels.attention.stored_kv import FP8
from minisgl.kernels.compile import flashinfer_setup
from minisgl.kernels.compile.flashinfer_kernels import XqaKernel
from support.kernels.dense_attention import attention_shape

CPU = attention_shape(
    query_heads=4, kv_heads=2, head_dim=128, page_size=64, longest=256, dtype=torch.bfloat16, device="cpu"
)


@pytest.mark.parametrize("name", ["auto", "torch", "torch,torch", " torch , auto "])
def test_without_a_gpu_the_reference_is_selected(name: str) -> None:
    prefill, decode = select_backends(name, CPU)
    assert (prefill.name, decode.name) == ("torch", "torch")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flash", "is unknown; use auto, fa3, flashinfer, triton, torch, balanced, xqa, split"),
        ("xqa,torch", "'xqa' has no prefill kernel; use auto, fa3, flashinfer, triton, torch"),
        ("torch,fa3", "'fa3' has no decode kernel; use auto, balanced, xqa, flashinfer, split, torch"),
        ("fa3", "'fa3' cannot prefill here: it needs a CUDA device"),
        ("xqa", "'xqa' cannot decode here: it needs a CUDA device"),
        ("balanced", "'balanced' cannot decode here: it needs a CUDA device"),
        ("torch,flashinfer", "'flashinfer' cannot decode here: it needs a CUDA device"),
    ],
)
def test_a_backend_that_cannot_serve_is_rejected_with_the_reason(name: str, message: str) -> None:
    with pytest.raises(BackendUnavailable, match=message) as refused:
        select_backends(name, CPU)
    assert refused.value.code == "attention_backend_unavailable"


def test_reasons_name_the_unsupported_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    hopper = dataclasses.replace(CPU, device=torch.device("cuda"))
    odd = dataclasses.replace(hopper, page_size=48)
    assert "pages of 16, 32, 64 or 128 tokens, not 48" in str(xqa_backend.why_not(odd))
    assert "head sizes" in str(flashinfer_backend.why_not(dataclasses.replace(hopper, head_dim=80)))
    single = dataclasses.replace(hopper, dtype=torch.float32)
    assert "bfloat16 or float16, not in float32" in str(xqa_backend.why_not(single))


def test_windows_need_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flashinfer_setup, "load_flashinfer", lambda: None)
    monkeypatch.setenv(flashinfer_setup.KERNELS_DIR, str(tmp_path))
    windowed = dataclasses.replace(CPU, device=torch.device("cuda"), window=128)
    assert "use_sliding_window_True" in str(xqa_backend.why_not(windowed))
    assert "use_swa_True" in str(flashinfer_backend.why_not(windowed))
    assert "sliding window" in str(cascade_backend.why_not(windowed))
    assert balanced_backend.why_not(windowed) is None and split_backend.why_not(windowed) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"window": 128, "head_dim": 64, "sinks": True}, None),
        ({"window": 1024, "head_dim": 256}, None),
        ({"head_dim": 512}, None),
        ({"window": 128, "dtype": torch.float32}, "prompts with a window of 128 tokens: it computes in bfloat16"),
        ({"window": 128, "page_size": 48}, "prompts with a window of 128 tokens: it serves pages of 16"),
        ({"window": 128, "head_dim": 96}, "prompts with a window of 128 tokens: it serves head sizes"),
        (
            {"window": 128, "page_size": 16, "query_heads": 64},
            "rows with a window of 128 tokens: not balanced, because",
        ),
        ({"softcap": 50.0}, "rows with bounded scores: not balanced, because it does not bound scores"),
    ],
)
def test_an_fp8_cache_needs_fast_kernels_for_windows_and_bounded_scores(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], reason: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    shape = dataclasses.replace(CPU, device=torch.device("cuda"), kv_dtype=FP8, **change)
    refused = why_no_fp8(shape)
    assert refused is None if reason is None else reason in str(refused)


def test_older_gpus_have_no_fp8_cache_behind_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    plain = dataclasses.replace(CPU, device=torch.device("cuda"), kv_dtype=FP8)
    assert why_no_fp8(plain) is None
    with pytest.raises(BackendUnavailable, match="it needs a Hopper GPU; use --kv-cache-dtype auto"):
        select_backends("auto", dataclasses.replace(plain, window=128))


def test_a_missing_compiled_kernel_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(flashinfer_setup, "load_flashinfer", lambda: None)
    monkeypatch.setenv(flashinfer_setup.KERNELS_DIR, str(tmp_path))
    kernel = XqaKernel(torch.bfloat16, page_size=64, head_dim=128, group=2)
    assert f"has no kernel {kernel.name}" in str(flashinfer_setup.why_not_flashinfer(kernel))
    library = tmp_path / kernel.name / f"{kernel.name}.so"
    library.parent.mkdir()
    library.touch()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert flashinfer_setup.why_not_flashinfer(kernel) is None


@pytest.mark.parametrize(
    ("built_for", "capability", "chosen"),
    [
        (None, (9, 0), True),
        (None, (8, 0), False),
        (None, (12, 0), False),
        ("9.0a", (9, 0), True),
        ("9.0a", (10, 0), False),
        ("10.0a", (10, 3), False),
        ("10.0f", (10, 3), True),
        ("8.0", (8, 6), True),
        ("8.6", (8, 0), False),
        ("8.0", (9, 0), False),
    ],
)
def test_kernels_compiled_for_other_gpus_are_not_selected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, built_for: str | None, capability: tuple[int, int], chosen: bool
) -> None:
    monkeypatch.setattr(flashinfer_setup, "load_flashinfer", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setenv(flashinfer_setup.KERNELS_DIR, str(tmp_path))
    kernel = XqaKernel(torch.bfloat16, page_size=64, head_dim=128, group=2)
    (tmp_path / kernel.name).mkdir()
    (tmp_path / kernel.name / f"{kernel.name}.so").touch()
    if built_for is not None:
        (tmp_path / flashinfer_setup.ARCHITECTURE_FILE).write_text(built_for)
    reason = flashinfer_setup.why_not_flashinfer(kernel)
    assert reason is None if chosen else f"are for GPUs of {built_for or '9.0a'}, not for this one" in str(reason)


def test_falling_back_to_the_reference_on_a_gpu_is_a_warning_with_reasons(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    prefill, decode = select_backends("auto", dataclasses.replace(CPU, device=torch.device("cuda"), head_dim=80))
    assert (prefill.name, decode.name) == ("torch", "torch")
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert (
        "not fa3, because it needs a Hopper GPU; not flashinfer, because it has kernels for head sizes" in caplog.text
    )
