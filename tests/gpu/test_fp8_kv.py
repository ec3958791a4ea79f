"""Attention to a KV pool in FP8 against float64, and whole engines with one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl.attention import balanced_backend, cascade_backend, fa3_backend
from minisgl.attention.backend import AttentionShape
from minisgl.attention.balanced_backend import BalancedDecode
from minisgl.attention.cascade_backend import CascadeDecode
from minisgl.attention.fa3_backend import Fa3Prefill
from minisgl.attention.select import select_backends, why_no_fp8
from minisgl.attention.torch_backend import TorchDecode, TorchPrefill
from minisgl.kernels.attention.stored_kv import FP8
from minisgl.wire.shared_prefixes import SharedPrefix
from support.kernels.decode_kernels import check_rotate_and_store, check_rotated_split_decode, check_split_decode
from support.kernels.dense_attention import DenseCase, Sequences, attention_shape
from support.kernels.sizes import sized, sized_device
from support.numerics.gpu_engine import answer, assert_bitwise_equal, engine_config
from support.plans import Segment, make_plan, new_row

CUDA = torch.device("cuda")
FIRST_ROWS, OTHER_ROWS = (np.arange(*sized(*rows), dtype=np.int32) for rows in (((80,), (50,)), ((84, 99), (54, 60))))
SHARED = Sequences(
    decode=tuple(sized(range(300, 400), range(150, 211))),
    prefixes=(SharedPrefix(sized(4, 2), FIRST_ROWS), SharedPrefix(sized(3, 1), OTHER_ROWS)),
)
MANY = (700, 1, 2, 31, 32, 33, 63, 64, 65, 2047, 17, 900, 128, 129)
BATCHES = {"many": MANY, "one": (1234,), "short": tuple(range(1, 40))}


def _shape(group: int = 5, head_dim: int = 128, page_size: int = 64, kv_heads: int = 2) -> AttentionShape:
    return attention_shape(
        query_heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        longest=2048,
        dtype=torch.bfloat16,
        device="cuda",
        kv_dtype=FP8,
    )


def _assert_close(result: torch.Tensor, case: DenseCase) -> None:
    ours, expected = result.double().cpu(), case.expected()
    assert ours.isfinite().all()
    assert float((ours - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("name", "group"),
    sized(list(product(BATCHES, [1, 5, 8])), [("many", 1), ("many", 5), ("many", 8), ("short", 5)]),
)
def test_balanced_decode(name: str, group: int, head_dim: int, page_size: int) -> None:
    shape = _shape(group, head_dim, page_size)
    if reason := balanced_backend.why_not(shape):
        pytest.skip(reason)
    case = DenseCase(shape, Sequences(decode=BATCHES[name]))
    with sized_device():
        result = case.run(TorchPrefill(shape), BalancedDecode(shape, None))
    _assert_close(result, case)


@pytest.mark.parametrize("sequences", [SHARED, Sequences(decode=MANY)], ids=["two_groups", "no_group"])
@pytest.mark.parametrize(("group", "head_dim"), [(5, 128), (8, 64)])
def test_cascade(sequences: Sequences, group: int, head_dim: int) -> None:
    shape = _shape(group, head_dim)
    if reason := cascade_backend.why_not(shape):
        pytest.skip(reason)
    case = DenseCase(shape, sequences)
    cascade = CascadeDecode(shape, len(sequences.decode) + 3)
    case.use_prefixes(cascade.layout)
    _assert_close(case.run(TorchPrefill(shape), TorchDecode(shape), cascade), case)


@pytest.mark.parametrize("segments", [((0, 300), (0, 1)), ((640, 200), (0, 300), (1, 1), (129, 129))])
def test_prefill(segments: tuple[tuple[int, int], ...]) -> None:
    shape = _shape()
    if reason := fa3_backend.why_not(shape):
        pytest.skip(reason)
    case = DenseCase(shape, Sequences(decode=(5,), segments=segments))
    _assert_close(case.run(Fa3Prefill(shape, TorchPrefill(shape)), TorchDecode(shape)), case)


@pytest.mark.parametrize(("group", "head_dim"), [(5, 128), (7, 64), (4, 256)])
@pytest.mark.parametrize("lengths", [(1,), (1028,), (64, 65, 700, sized(5000, 2100))])
def test_split_decode(lengths: tuple[int, ...], group: int, head_dim: int) -> None:
    check_split_decode(
        CUDA, lengths=lengths, kv_heads=2, group=group, head_dim=head_dim, page_size=64, dtype=torch.bfloat16,
        kv_dtype=FP8,
    )  # fmt: skip
    check_rotated_split_decode(
        CUDA, lengths=lengths, kv_heads=2, group=group, head_dim=head_dim, norm=head_dim == 128, dtype=torch.bfloat16,
        kv_dtype=FP8,
    )  # fmt: skip


@pytest.mark.parametrize(
    "sequences",
    [
        Sequences(decode=(1, 700, 65)),
        Sequences(decode=MANY),
        Sequences(segments=((640, 200), (0, 300), (1, 1), (129, 129))),
        Sequences(decode=(5, 900), segments=((0, 65), (700, 100))),
    ],
    ids=["few rows", "many rows", "prompts", "both"],
)
@pytest.mark.parametrize(
    ("group", "head_dim", "window", "sinks"),
    [(8, 64, 128, True), (8, 64, None, True), (2, 256, 1024, False), (2, 256, 128, False), (8, 512, None, False)],
    ids=["gpt-oss in windows", "gpt-oss", "Gemma in windows", "Gemma in short windows", "Gemma 4"],
)
def test_layers_of_models_with_windows(
    group: int, head_dim: int, window: int | None, sinks: bool, sequences: Sequences
) -> None:
    shape = replace(_shape(group, head_dim), window=window, sinks=sinks)
    if reason := why_no_fp8(shape):
        pytest.skip(reason)
    case = DenseCase(shape, sequences)
    _assert_close(case.run(*select_backends("auto", shape)), case)


@pytest.mark.parametrize(("count", "kept_from"), [(1, 1), (77, 30)])
@pytest.mark.parametrize("norm", [False, True])
def test_rotate_and_store(count: int, kept_from: int, norm: bool) -> None:
    check_rotate_and_store(
        CUDA, count=count, q_heads=40, k_heads=8, head_dim=128, norm=norm, kept_from=kept_from, dtype=torch.bfloat16,
        kv_dtype=FP8,
    )  # fmt: skip


@pytest.mark.captures
@pytest.mark.parametrize("rows", [3, 16])
def test_graphs_are_bitwise_equal_to_eager_steps(checkpoint: Path, rows: int) -> None:
    pages = [(row, column, row * 4 + column) for row in range(rows) for column in range(4)]
    prompts = [list(range(3, 8 + 13 * row)) for row in range(rows)]
    prefill = [Segment(row, 0, prompt) for row, prompt in enumerate(prompts)]
    plans = [make_plan(0, prefill=prefill, pages=pages, rows=[new_row(row) for row in range(rows)])]
    steps = sized(12, 8)
    for step in range(1, steps):
        plans.append(make_plan(step, decode=[(row, len(prompt) + step - 1) for row, prompt in enumerate(prompts)]))
    eager, replayed = (
        answer(
            engine_config(
                checkpoint, num_pages=rows * 4, max_running=rows, max_step_tokens=4096, audit=True,
                kv_cache_dtype="fp8", cuda_graph_max_batch=size, cuda_graph_max_tokens=0,
            ),
            plans,
        )
        for size in (0, rows)
    )  # fmt: skip
    assert replayed.stats.graph_replays == steps - 1
    assert_bitwise_equal(eager, replayed)
