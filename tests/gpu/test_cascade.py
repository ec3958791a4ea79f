"""Decode attention that reads shared pages once, on a CUDA device."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl.attention.backend import AttentionShape
from minisgl.attention.batch import AttentionBatch, PagedKV
from minisgl.attention.cascade_backend import CascadeDecode, why_not
from minisgl.attention.torch_backend import TorchDecode, TorchPrefill
from minisgl.scheduler import shared_prefixes
from minisgl.wire.plan import StepPlan
from minisgl.wire.shared_prefixes import SharedPrefix
from support.engines import create_engine
from support.kernels.dense_attention import DenseCase, Sequences, attention_shape
from support.kernels.sizes import sized
from support.numerics.gpu_engine import (
    Answer,
    answer,
    assert_bitwise_equal,
    assert_equal_where_the_gap_allows,
    engine_config,
)
from support.numerics.random_load import RandomLoad, config
from support.plans import Segment, make_plan, new_row


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def _range(*limits: int) -> np.ndarray:
    return np.arange(*limits, dtype=np.int32)


LENGTHS = sized(
    (*range(513, 593), 3, 700, 64, 65, *range(1025, 1040), 1, 2000),
    (*range(129, 199), 3, 200, 64, 65, 1153, 1170, 1217, 1, 300),
)
"""80 rows, rows of their own, 15 rows, rows of their own. Small: 70 and 3 rows."""
TWO_GROUPS = Sequences(
    decode=LENGTHS,
    prefixes=sized(
        (SharedPrefix(4, _range(80)), SharedPrefix(8, _range(84, 99))),
        # The longer prefix is divided into two parts.
        (SharedPrefix(2, _range(70)), SharedPrefix(18, _range(74, 77))),
    ),
)
ONE_GROUP = Sequences(
    decode=LENGTHS,
    prefixes=(
        sized(
            SharedPrefix(3, _ints(*range(1, 82, 2), *range(85, 99, 2))),
            SharedPrefix(1, _ints(*range(1, 72, 2), 74, 76)),
        ),
    ),
)
NO_GROUP = Sequences(decode=LENGTHS)
GROUPS = (1, 2, 4, 5, 7, 8, 16)
SEQUENCES = {"two_groups": TWO_GROUPS, "one_group": ONE_GROUP, "no_group": NO_GROUP}


def _shape(
    group: int = 2, page_size: int = 64, head_dim: int = 128, kv_heads: int = 2, dtype: torch.dtype = torch.bfloat16
) -> AttentionShape:
    shape = attention_shape(
        query_heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        longest=2048,
        dtype=dtype,
        device="cuda",
    )
    if reason := why_not(shape):
        pytest.skip(reason)
    return shape


def _at_page_size(sequences: Sequences, page_size: int) -> Sequences:
    """The same shared tokens in other pages."""
    return Sequences(
        decode=sequences.decode,
        prefixes=[SharedPrefix(prefix.pages * 64 // page_size, prefix.rows) for prefix in sequences.prefixes],
    )


def _check(shape: AttentionShape, sequences: Sequences) -> None:
    case = DenseCase(shape, sequences)
    cascade = CascadeDecode(shape, len(sequences.decode) + 3)
    case.use_prefixes(cascade.layout)
    result = case.run(TorchPrefill(shape), TorchDecode(shape), cascade).double().cpu()
    expected = case.expected()
    assert result.isfinite().all()
    assert float((result - expected).norm() / expected.norm()) < 1e-2
    torch.testing.assert_close(result, expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize(
    ("name", "group"),
    sized(
        list(product(SEQUENCES, GROUPS)),
        [*product(["two_groups"], GROUPS), ("one_group", 2), ("no_group", 2)],
    ),
)
def test_attention_matches_float64(name: str, group: int) -> None:
    """Unowned pages and positions that are not written yet are NaN."""
    _check(_shape(group), SEQUENCES[name])


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_sizes_of_pages_and_heads(page_size: int, head_dim: int, dtype: torch.dtype) -> None:
    _check(_shape(5, page_size, head_dim, dtype=dtype), _at_page_size(TWO_GROUPS, page_size))


def test_pages_of_128() -> None:
    _check(_shape(2, 128), _at_page_size(TWO_GROUPS, 128))


def test_many_kv_heads() -> None:
    _check(_shape(2, kv_heads=8), TWO_GROUPS)


@pytest.mark.captures
def test_a_graph_replays_for_other_groups() -> None:
    shape = _shape()
    # What the graph reads is the first one's; the others are copied there.
    first, *others = (
        DenseCase(shape, Sequences(decode=LENGTHS, prefixes=sequences.prefixes), seed=seed)
        for seed, sequences in enumerate((NO_GROUP, TWO_GROUPS, ONE_GROUP, NO_GROUP))
    )
    cascade = CascadeDecode(shape, len(LENGTHS))
    for case in (first, *others):
        case.use_prefixes(cascade.layout)
    pages = max(case.kv.keys.shape[1] for case in (first, *others))
    size = (1, pages, *first.kv.keys.shape[2:])
    keys, values = (torch.full(size, torch.nan, dtype=shape.dtype, device="cuda") for _ in "kv")
    kv = PagedKV(keys, values, scales=first.kv.scales)
    out = torch.empty_like(first.q)
    batch = first.batch

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
        cascade.begin(batch)
        cascade.decode(0, kv, first.q, out)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        cascade.begin(batch)
        cascade.decode(0, kv, first.q, out)
        graph.capture_end()
        for case in others:
            expected = case.expected()
            load(case)
            graph.replay()
            stream.synchronize()
            torch.testing.assert_close(out.flatten(1).double().cpu(), expected, atol=3e-2, rtol=3e-2)


def _tensors(batch: AttentionBatch) -> list[torch.Tensor]:
    assert batch.cascade is not None
    tables = batch.cascade
    return [
        batch.page_table,
        batch.decode_slots,
        batch.decode_lengths,
        tables.counts,
        tables.prefix_pages,
        tables.tiles,
    ]


ROWS = 24
SHARED = np.random.default_rng(100).integers(3, 500, 3 * 64).tolist()
OWN = [np.random.default_rng(row).integers(3, 500, 5 + 9 * row).tolist() for row in range(ROWS)]
"""Row 0 holds the shared pages; the last four rows do not share them."""


STEPS = sized(12, 8)


def _plans(*, shared: bool, pausing: bool) -> list[StepPlan]:
    """One prompt, then all others behind its pages, then decode steps of all rows. `pausing`: without row 3 in every
    other one, which is padded then."""
    sharing = range(ROWS - 4)
    prompts = [(SHARED if row in sharing else []) + own for row, own in enumerate(OWN)]
    pages = [(row, column, column) for row in sharing for column in range(3)]
    pages += [(row, column, 3 + row * 7 + column) for row in range(ROWS) for column in range(3 * (row in sharing), 7)]
    prefill = [Segment(0, 0, prompts[0])]
    prefill += [Segment(row, len(SHARED), OWN[row]) for row in sharing if row]
    prefill += [Segment(row, 0, prompts[row]) for row in range(ROWS - 4, ROWS)]
    plans = [make_plan(0, prefill=prefill, pages=pages, rows=[new_row(row) for row in range(ROWS)])]
    for step in range(1, STEPS):
        rows = [row for row in range(ROWS) if not pausing or step % 2 or row != 3]
        groups = [SharedPrefix(3, _ints(*(i for i, row in enumerate(rows) if row in sharing)))]
        missed = (step - 1) // 2 if pausing else 0
        decode = [(row, len(prompts[row]) + step - 1 - (row == 3) * missed) for row in rows]
        plans.append(make_plan(step, decode=decode, prefixes=groups if shared else ()))
    return plans


def _answer(checkpoint: Path, plans: list[StepPlan], **settings: object) -> Answer:
    config = engine_config(
        checkpoint, num_pages=3 + ROWS * 7, max_running=ROWS, max_step_tokens=8192, audit=True, **settings
    )
    return answer(config, plans)


@pytest.mark.captures
def test_tokens_match_rows_without_shared_reads(checkpoint: Path) -> None:
    plans = [_plans(shared=shared, pausing=True) for shared in (False, True)]
    plain, shared = (_answer(checkpoint, part) for part in plans)
    assert plain.stats.cascade_steps == 0 and shared.stats.cascade_steps == STEPS - 1
    assert_equal_where_the_gap_allows(plans[0], plain, shared)


@pytest.mark.captures
def test_a_graph_is_bitwise_equal_to_an_eager_step(checkpoint: Path) -> None:
    plans = _plans(shared=True, pausing=False)
    eager, replayed = (_answer(checkpoint, plans, cuda_graph_max_batch=size) for size in (0, ROWS))
    assert eager.stats.cascade_steps == replayed.stats.cascade_steps == STEPS - 1
    if replayed.stats.decode_backend == "torch":
        pytest.skip("no backend that can be captured is here")
    assert (eager.stats.graph_replays, replayed.stats.graph_replays) == (0, STEPS - 1)
    assert_bitwise_equal(eager, replayed)


@pytest.mark.captures
def test_random_load_with_groups_of_all_sizes(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads a page that is not its own, or a position that is not written yet, gets NaN and fails."""
    for name, value in (("MIN_GROUP_ROWS", 2), ("MIN_SAVED_TOKENS", 1), ("MIN_SAVED_SHARE", 0.0)):
        monkeypatch.setattr(shared_prefixes, name, value)
    engine = create_engine(config(checkpoint, "cuda", rows=24, longest=512, max_step_tokens=1024))
    load = RandomLoad(engine, max_step_tokens=1024, seed=1)
    load.run(seconds=sized(15, 3))
    # In this time a sanitizer may not get to a burst with so many requests that some share pages.
    for _ in range(10):
        if not engine.stats.cascade_steps:
            load.run(seconds=3)
    engine.close()
    assert engine.stats.cascade_steps
