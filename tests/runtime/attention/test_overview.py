from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from minisgl.attention import fa3_backend, select
from minisgl.attention.backend import AttentionShape
from minisgl.attention.balanced_backend import BalancedDecode
from minisgl.attention.fa3_backend import Fa3Prefill
from minisgl.attention.flashinfer_backend import FlashInferPrefill
from minisgl.attention.overview import overview
from minisgl.attention.select import select_backends
from minisgl.attention.split_backend import MOST_ROWS, LongContexts, SplitDecode
from minisgl.attention.torch_backend import TorchDecode, TorchPrefill
from minisgl.kernels.build.triton import Architecture, Launches
from support.kernels.dense_attention import attention_shape

SHAPE = attention_shape(
    query_heads=4, kv_heads=2, head_dim=128, page_size=64, longest=256, dtype=torch.bfloat16, device="cpu"
)
HOPPER = dataclasses.replace(SHAPE, device=torch.device("cuda"))


def test_a_cpu_uses_the_reference_for_everything() -> None:
    assert overview(*select_backends("auto", SHAPE), None, max_rows=256) == dict.fromkeys(
        ("prefill", "prefill_with_prefix", "decode", "decode_with_prefill"), "torch"
    )


def test_ranges_of_rows_are_those_that_each_backend_serves() -> None:
    with Launches().recorded(Architecture.parse("9.0a")):
        decode = SplitDecode(HOPPER, BalancedDecode(HOPPER, TorchDecode(HOPPER)))
        found = overview(TorchPrefill(HOPPER), decode, None, max_rows=32)
        few = overview(TorchPrefill(HOPPER), decode, None, max_rows=3)
    assert found == {
        "prefill": "torch",
        "prefill_with_prefix": "torch",
        "decode_1_to_4_rows": "split",
        "decode_5_to_8_rows": "torch",
        "decode_9_to_32_rows": "balanced",
        "decode_with_prefill_1_to_4_rows": "split",
        "decode_with_prefill_5_to_32_rows": "torch",
    }
    assert few["decode"] == "split"


def test_long_contexts_of_few_rows_have_a_backend_of_their_own() -> None:
    with Launches().recorded(Architecture.parse("9.0a")):
        tokens = 1000
        long = LongContexts(BalancedDecode(HOPPER, None), tokens * 2 * HOPPER.kv_heads * HOPPER.head_dim * 2)
        decode = SplitDecode(HOPPER, TorchDecode(HOPPER), long)
        without = SplitDecode(HOPPER, TorchDecode(HOPPER))
    assert overview(TorchPrefill(HOPPER), decode, None, max_rows=4)["decode"] == "split, balanced"
    assert decode.is_long(np.array([tokens], np.int32)) and decode.is_long(np.array([1, tokens - 1], np.int32))
    assert not decode.is_long(np.array([tokens - 1], np.int32))
    assert not decode.is_long(np.full(MOST_ROWS + 1, tokens, np.int32))
    assert not without.is_long(np.array([tokens], np.int32))


@pytest.mark.parametrize(("head_dim", "stand_in"), [(128, "triton"), (96, "torch")])
def test_the_backend_behind_prefixes_that_are_too_long_to_copy_is_named_and_the_reference_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, head_dim: int, stand_in: str
) -> None:
    monkeypatch.setattr(fa3_backend, "load_fa3", lambda: None)
    _without_flashinfer(monkeypatch)
    shape = dataclasses.replace(HOPPER, head_dim=head_dim)
    prefixes = []
    for pages in (4, 1 << 15):
        with Launches().recorded(Architecture.parse("9.0a")):
            prefill, _ = select_backends("fa3,torch", dataclasses.replace(shape, pages_per_row=pages))
        assert isinstance(prefill, Fa3Prefill) and prefill.backend_for(prefix=False) == "fa3"
        prefixes.append(prefill.backend_for(prefix=True))
    assert prefixes == ["fa3", f"fa3, {stand_in}"]
    warnings = [record.getMessage() for record in caplog.records if "for prefill" in record.getMessage()]
    assert len(warnings) == (stand_in == "torch")
    assert all("is torch: not flashinfer, because nvcc is not here; not triton, because" in each for each in warnings)


def test_captured_steps_beyond_a_window_are_those_of_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa3_backend, "load_fa3", lambda: None)
    _without_flashinfer(monkeypatch)
    longest = 1 << 10
    shape = dataclasses.replace(HOPPER, pages_per_row=longest // HOPPER.page_size)
    for window, backend, most_keys in ((None, "fa3", 1 << 15), (128, "triton", longest)):
        with Launches().recorded(Architecture.parse("9.0a")):
            prefill, _ = select_backends("fa3,auto", dataclasses.replace(shape, window=window))
        captured = prefill.for_graph(64, 3, prefix=True)
        assert captured is not None and (captured.name, prefill.most_graph_keys) == (backend, most_keys)


def test_the_reference_on_a_gpu_is_a_warning_also_when_it_is_configured(caplog: pytest.LogCaptureFixture) -> None:
    with Launches().recorded(Architecture.parse("9.0a")):
        select_backends("torch", HOPPER)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "many times slower than auto" in caplog.text


def _without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    def why_not(shape: AttentionShape) -> str:
        return "nvcc is not here"

    choices = dict(select._PREFILL) | {"flashinfer": (why_not, FlashInferPrefill)}
    monkeypatch.setattr(select, "_PREFILL", choices)
