from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from minisgl.attention.backend import AttentionShape
from minisgl.attention.select import KVGroup
from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.engine.start import kv_pool
from minisgl.errors import EngineError
from minisgl.kernels.attention.stored_kv import FP8, KVScales
from minisgl.kv_layout import KVLayout, PoolPages


class Ranks:
    """A group whose other ranks have fixed values."""

    def __init__(self, *others: int) -> None:
        self._others = others

    def gather_int(self, value: int) -> list[int]:
        return [value, *self._others]


def _shape(**changes: Any) -> AttentionShape:
    shape = AttentionShape(
        query_heads=1,
        kv_heads=1,
        head_dim=8,
        page_size=4,
        pages_per_row=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return replace(shape, **changes)


def _settle(pool_bytes: int, *others: int) -> int:
    ranks = cast(TensorParallel, Ranks(*others))
    layout = KVLayout(page_size=4, full_bytes=1000, max_model_len=200, max_running=4, max_step_tokens=100)
    return kv_pool.pages_for_budget(ranks, layout, pool_bytes).full


def test_bytes_of_a_page() -> None:
    # Qwen3-0.6B: 112 KiB per token in bfloat16.
    shape = _shape(kv_heads=8, head_dim=128, page_size=64, dtype=torch.bfloat16)
    assert kv_pool.page_bytes([KVGroup(shape, tuple(range(28)))]) == 64 * 112 * 1024
    # Gemma 4 31B: 800 KiB per token in layers with a window, 80 in the others.
    windowed = KVGroup(replace(shape, kv_heads=16, head_dim=256, window=1024), tuple(range(50)))
    others = KVGroup(replace(shape, kv_heads=4, head_dim=512), tuple(range(50, 60)))
    assert kv_pool.page_bytes([windowed, others]) == 64 * 880 * 1024


def test_every_rank_has_the_pages_of_the_smallest() -> None:
    assert _settle(70_999, 65_000, 80_000) == 65


def test_the_pool_has_at_most_the_pages_that_all_rows_can_fill() -> None:
    assert _settle(10**9) == 200


@pytest.mark.parametrize("pool_bytes", [999, 0, -5_000_000])
def test_too_little_memory_is_reported_with_rank_and_remedy(pool_bytes: int) -> None:
    with pytest.raises(EngineError, match=r"rank 0 .*raise the memory fraction") as refused:
        _settle(pool_bytes, 10**6)
    assert refused.value.code == "out_of_memory"


def test_unequal_devices_are_an_error_that_names_the_ranks() -> None:
    kv_pool.check_memory_balance([100 << 30, 91 << 30])
    with pytest.raises(EngineError, match=r"rank 0: 100.0 GiB, rank 1: 80.0 GiB") as refused:
        kv_pool.check_memory_balance([100 << 30, 80 << 30])
    assert refused.value.code == "memory_imbalance"


@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_audit_fills_all_but_the_dummy_page_with_nan(kv_dtype: torch.dtype | None) -> None:
    shape = replace(_shape(), kv_dtype=kv_dtype)
    groups = [KVGroup(shape, (0, 2)), KVGroup(replace(shape, head_dim=16), (1,))]
    scales = [KVScales(1.0 + i) for i in range(3)]
    kv = kv_pool.allocate(groups, scales=scales, pages=PoolPages(3, 0), audit=True)
    assert kv.dummy_page(in_window=False) == 3 and kv.page_size == 4
    for group, (of, layers) in zip(kv.groups, groups, strict=True):
        assert group.keys.dtype == shape.stored_dtype and group.keys.shape == (len(layers), 4, 4, 1, of.head_dim)
        assert group.scales == tuple(KVScales(1.0 + layer) for layer in layers)
        for pool in (group.keys, group.values):
            assert pool[:, :3].float().isnan().all() and (pool[:, 3].float() == 0).all()
            pool.zero_()
    kv.poison(torch.tensor([1]), in_window=False)
    for group in kv.groups:
        keys = group.keys.float()
        assert keys[:, 1].isnan().all() and not keys[:, [0, 2, 3]].isnan().any()


def test_a_page_in_fp8_takes_a_byte_per_number() -> None:
    shape = _shape()
    numbers = kv_pool.page_bytes([KVGroup(shape, (0, 1))]) // shape.dtype.itemsize
    assert kv_pool.page_bytes([KVGroup(replace(shape, kv_dtype=FP8), (0, 1))]) == numbers


def test_the_ranks_of_a_machine_without_gpu_share_its_memory() -> None:
    assert 2 * kv_pool.cpu_pool_bytes(1 << 30, 2) == kv_pool.cpu_pool_bytes(1 << 30, 1) < 1 << 30
    assert kv_pool.free_memory(torch.device("cpu")) > 0


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "3000\n", "memory.current": "1000\n"}, 2000),
        ({"memory/memory.limit_in_bytes": "3000\n", "memory/memory.usage_in_bytes": "1000\n"}, 2000),
        ({"memory.max": "1000\n", "memory.current": "3000\n"}, 0),
    ],
)
def test_the_memory_limit_of_a_container_is_respected(
    files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(kv_pool, "_CGROUP", tmp_path)
    assert kv_pool.free_memory(torch.device("cpu")) == expected
