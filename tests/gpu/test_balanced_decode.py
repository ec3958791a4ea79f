"""Decode attention in spans of equal size, on a CUDA device."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl.attention import balanced_backend
from minisgl.attention.backend import AttentionShape
from minisgl.attention.balanced_backend import BalancedDecode
from minisgl.attention.batch import AttentionBatch, PagedKV
from minisgl.attention.torch_backend import TorchDecode, TorchPrefill
from minisgl.wire.plan import StepPlan
from support.engines import create_engine
from support.kernels.dense_attention import DenseCase, Sequences, attention_shape
from support.kernels.sizes import sized, sized_device
from support.numerics.gpu_engine import (
    Answer,
    answer,
    assert_bitwise_equal,
    assert_equal_where_the_gap_allows,
    engine_config,
)
from support.numerics.random_load import RandomLoad, config
from support.plans import Segment, make_plan, new_row

LENGTHS = np.random.default_rng(0).integers(1, sized(2000, 500), sized(70, 20)).tolist()
SHAPES_OF_BATCHES = {
    "many": (*LENGTHS, 1, 2, 31, 32, 33, 63, 64, 65, 2047),
    "few": (5, 1900, 64),
    "one": (1234,),
    "short": tuple(range(1, 40)),
    "one long row among short ones": (*range(1, 20), 2000, *range(1, 20)),
}
GROUPS = (1, 2, 4, 5, 7, 8, 16)


def _shape(
    group: int = 2,
    page_size: int = 64,
    head_dim: int = 128,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    window: int | None = None,
) -> AttentionShape:
    shape = attention_shape(
        query_heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        longest=2048,
        dtype=dtype,
        device="cuda",
        window=window,
    )
    if reason := balanced_backend.why_not(shape):
        pytest.skip(reason)
    return shape


def _check(shape: AttentionShape, decode: tuple[int, ...]) -> None:
    """Unowned pages and positions that are not written yet are NaN."""
    case = DenseCase(shape, Sequences(decode=decode))
    with sized_device():
        result = case.run(TorchPrefill(shape), BalancedDecode(shape, None)).double().cpu()
    expected = case.expected()
    assert result.isfinite().all()
    assert float((result - expected).norm() / expected.norm()) < 1e-2
    torch.testing.assert_close(result, expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize(
    ("name", "group"),
    sized(
        list(product(SHAPES_OF_BATCHES, GROUPS)), [*product(["many"], GROUPS), *product([*SHAPES_OF_BATCHES][1:], [2])]
    ),
)
def test_attention_matches_float64(name: str, group: int) -> None:
    _check(_shape(group), SHAPES_OF_BATCHES[name])


@pytest.mark.parametrize("group", [1, 4, 7, 8])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_groups_with_heads_of_other_sizes(head_dim: int, group: int) -> None:
    _check(_shape(group, head_dim=head_dim), SHAPES_OF_BATCHES["many"])


@pytest.mark.parametrize(
    ("head_dim", "page_size", "window"), [(64, 16, 70), (64, 64, 128), (128, 64, 1), (128, 16, 512), (256, 64, 100)]
)
def test_windows(head_dim: int, page_size: int, window: int) -> None:
    _check(_shape(7, page_size, head_dim, window=window), SHAPES_OF_BATCHES["many"])


@pytest.mark.parametrize("page_size", [16, 32, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_sizes_of_pages_and_heads(page_size: int, head_dim: int, dtype: torch.dtype) -> None:
    _check(_shape(5, page_size, head_dim, dtype=dtype), SHAPES_OF_BATCHES["many"])


@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_other_numbers_of_kv_heads(kv_heads: int) -> None:
    _check(_shape(2, kv_heads=kv_heads), SHAPES_OF_BATCHES["many"])


def test_few_rows_go_to_the_other_backend() -> None:
    shape = _shape()
    case = DenseCase(shape, Sequences(decode=(5, 900, 64)))
    result = case.run(TorchPrefill(shape), BalancedDecode(shape, TorchDecode(shape)))
    assert torch.equal(result, case.run(TorchPrefill(shape), TorchDecode(shape)))


@pytest.mark.captures
def test_a_graph_replays_for_other_lengths_and_gives_the_same_each_time() -> None:
    shape = _shape(kv_heads=8)
    decode = BalancedDecode(shape, None)
    longest = sized(2000, 300)
    first, *others = (
        DenseCase(shape, Sequences(decode=np.random.default_rng(seed).integers(1, longest, 40).tolist()), seed=seed)
        for seed in range(4)
    )
    pages = max(case.kv.keys.shape[1] for case in (first, *others))
    size = (1, pages, *first.kv.keys.shape[2:])
    keys, values = (torch.full(size, torch.nan, dtype=shape.dtype, device="cuda") for _ in "kv")
    kv = PagedKV(keys, values, first.kv.scales)
    out, batch = torch.empty_like(first.q), first.batch

    def load(case: DenseCase) -> None:
        for ours, theirs in zip(_tensors(batch), _tensors(case.batch), strict=True):
            ours.copy_(theirs.clone())
        first.q.copy_(case.q.clone())
        case.store()
        count = case.kv.keys.shape[1]
        kv.keys[:, :count], kv.values[:, :count] = case.kv.keys, case.kv.values

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        load(first)
        with sized_device():
            decode.prepare(batch)
        decode.begin(batch)
        decode.decode(0, kv, first.q, out)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        decode.begin(batch)
        # Twice, as two layers do: what one leaves in scratch memory must not reach the other.
        decode.decode(0, kv, first.q, out)
        decode.decode(0, kv, first.q, out)
        graph.capture_end()
        for case in others:
            load(case)
            results = []
            for _ in range(sized(20, 3)):
                out.fill_(torch.nan)
                graph.replay()
                results.append(out.clone())
            stream.synchronize()
            torch.testing.assert_close(out.flatten(1).double().cpu(), case.expected(), atol=3e-2, rtol=3e-2)
            assert all(torch.equal(result, results[0]) for result in results)


def _tensors(batch: AttentionBatch) -> list[torch.Tensor]:
    return [batch.page_table, batch.decode_slots, batch.decode_lengths]


ROWS = 16
PROMPTS = [np.random.default_rng(row).integers(3, 500, 5 + 13 * row).tolist() for row in range(ROWS)]
PAGES = 4


def _plans(steps: int) -> list[StepPlan]:
    """All prompts, then decode steps of all rows, over the end of a page."""
    pages = [(row, column, row * PAGES + column) for row in range(ROWS) for column in range(PAGES)]
    prefill = [Segment(row, 0, prompt) for row, prompt in enumerate(PROMPTS)]
    plans = [make_plan(0, prefill=prefill, pages=pages, rows=[new_row(row) for row in range(ROWS)])]
    for step in range(1, steps):
        plans.append(make_plan(step, decode=[(row, len(prompt) + step - 1) for row, prompt in enumerate(PROMPTS)]))
    return plans


def _answer(checkpoint: Path, plans: list[StepPlan], **settings: object) -> Answer:
    config = engine_config(
        checkpoint, num_pages=ROWS * PAGES, max_running=ROWS, max_step_tokens=4096, audit=True, **settings
    )
    return answer(config, plans)


@pytest.mark.captures
def test_a_graph_is_bitwise_equal_to_an_eager_step_and_tokens_match_the_reference(checkpoint: Path) -> None:
    _shape()
    steps = sized(20, 8)
    plans = _plans(steps)
    eager, replayed = (
        _answer(checkpoint, plans, attention_backend="balanced", cuda_graph_max_batch=size) for size in (0, ROWS)
    )
    assert (eager.stats.graph_replays, replayed.stats.graph_replays) == (0, steps - 1)
    assert_bitwise_equal(eager, replayed)
    assert_equal_where_the_gap_allows(plans, _answer(checkpoint, plans, attention_backend="torch"), eager)


@pytest.mark.captures
def test_random_load(checkpoint: Path) -> None:
    """Whoever reads a page that is not its own, or a position that is not written yet, gets NaN and fails."""
    _shape()
    settings = config(checkpoint, "cuda", rows=24, longest=512, max_step_tokens=1024, attention_backend="balanced")
    engine = create_engine(settings)
    RandomLoad(engine, max_step_tokens=1024, seed=1).run(seconds=sized(10, 3))
    assert engine.stats.decode_backend == "balanced"
    engine.close()
