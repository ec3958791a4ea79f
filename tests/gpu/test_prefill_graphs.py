"""Captured steps with prompts against the same steps launched kernel by kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from minisgl.config import EngineConfig
from minisgl.engine.cuda_engine import CudaEngine
from minisgl.engine.engine import create_engine
from minisgl.engine.start.dummy_steps import PLAIN, Sampling, dummy_plan, step_limits
from minisgl.toy.tiny import TINY_ARCHS
from support.numerics.gpu_engine import Answer, answer, assert_equal_where_the_gap_allows, engine_config, run
from support.numerics.mixed_steps import MixedSteps
from support.plans import Segment, make_plan, new_row

STEPS = MixedSteps(rows=24, page_size=64, longest_prompt=700, longest_chunk=400, most_tokens=1024)


def _config(checkpoint: Path, *, steps: MixedSteps = STEPS, graphs: bool = True, audit: bool = False) -> EngineConfig:
    return engine_config(
        checkpoint,
        page_size=steps.page_size,
        num_pages=steps.num_pages,
        max_running=steps.rows,
        max_model_len=steps.most_tokens,
        cuda_graph_max_tokens=2048 if graphs else 0,
        audit=audit,
    )


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("page_size", [16, 64])
def test_tokens_and_logits_are_those_of_eager_steps(checkpoint: Path, seed: int, page_size: int) -> None:
    steps = dataclasses.replace(STEPS, page_size=page_size)
    plans = steps.plans(seed, 40)
    eager = answer(_config(checkpoint, steps=steps, graphs=False), plans)
    captured = answer(_config(checkpoint, steps=steps), plans)
    _require_graphs(captured)
    assert_equal_where_the_gap_allows(plans, eager, captured)


def test_padding_reads_and_writes_no_page_of_other_rows(checkpoint: Path) -> None:
    """Unowned pages and unwritten positions are NaN."""
    captured = answer(_config(checkpoint, audit=True), STEPS.plans(7, 60))
    _require_graphs(captured)
    assert all(token >= 0 for step in captured.tokens for token in step)


def test_the_longest_sequence_may_end_within_a_page(checkpoint: Path) -> None:
    """Its pages reach to position 1,024, as do graphs of 1,024 tokens, which this model must not have."""
    steps = dataclasses.replace(STEPS, most_tokens=1000)
    plans = steps.plans(4, 12)
    eager = answer(_config(checkpoint, steps=steps, graphs=False), plans)
    captured = answer(_config(checkpoint, steps=steps), plans)
    _require_graphs(captured)
    assert_equal_where_the_gap_allows(plans, eager, captured)


@pytest.mark.parametrize("arch", TINY_ARCHS)
def test_graphs_of_any_architecture(arch: str, wide_checkpoint: Callable[[str], Path]) -> None:
    plans = STEPS.plans(3, 12)
    eager = answer(_config(wide_checkpoint(arch), graphs=False), plans)
    captured = answer(_config(wide_checkpoint(arch)), plans)
    _require_graphs(captured)
    assert_equal_where_the_gap_allows(plans, eager, captured)


def test_graphs_are_captured_for_their_first_step_or_in_idle_time(checkpoint: Path) -> None:
    engine = create_engine(_config(checkpoint))
    assert isinstance(engine, CudaEngine)
    if engine.stats.prefill_backend != "fa3":
        pytest.skip("no prefill backend that can be captured is here")
    graphs = engine._graphs
    assert [list(kind.missing()) for kind in graphs._kinds] == [kind.sizes[:-1] for kind in graphs._kinds]
    prompt = np.random.default_rng(0).integers(3, 500, 100).tolist()
    pages = [(0, index, index) for index in range(2)]
    plans = [make_plan(0, prefill=[Segment(0, 0, prompt)], pages=pages, rows=[new_row(0)])]
    run(engine, [*plans, make_plan(1, decode=[(0, len(prompt))])])
    assert engine.stats.graph_replays == 2
    missing = sum(len(list(kind.missing())) for kind in graphs._kinds)
    assert missing == sum(len(kind.sizes) - 1 for kind in graphs._kinds if kind.sizes) - 2
    assert [engine.use_idle_time() for _ in range(missing)] == [True] * missing
    assert not engine.use_idle_time()
    assert engine.stats.compiled_after_ready == 0
    engine.close()


def test_a_capture_waits_for_masks_of_another_thread(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the device waits for masks, nothing may wait for the device that holds the interpreter lock."""
    engine = create_engine(_config(checkpoint))
    assert isinstance(engine, CudaEngine)
    limits = step_limits(engine.runner, max_step_tokens=2048, max_model_len=STEPS.most_tokens)
    late = engine.launch(dummy_plan(limits, decode=3, sampling=[Sampling(masks=True)]))
    assert engine.waits_for_masks(late)
    masks = engine.mask_memory(3)
    masks[:] = -1
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        engine.sample(late, masks)

    monkeypatch.setattr("minisgl.engine.cuda_engine.time.sleep", sleep)
    following = engine.launch(dummy_plan(limits, decode=5, sampling=[PLAIN]))
    assert len(waits) == 1 and engine.stats.graph_replays == 2
    assert len(engine.collect(late).tokens) == 3 and len(engine.collect(following).tokens) == 5
    engine.close()


def test_filters_apply_to_rows_of_captured_steps(checkpoint: Path) -> None:
    """A temperature near 0 leaves the most likely token, with and without filters."""
    prompt = np.random.default_rng(0).integers(3, 500, 100).tolist()
    rows = [new_row(slot, temperature=0.01, top_k=5 * (slot % 2), seed=slot) for slot in range(6)]
    pages = [(slot, index, slot * STEPS.pages_per_row + index) for slot in range(6) for index in range(2)]
    plan = make_plan(0, prefill=[Segment(slot, 0, prompt[slot:]) for slot in range(6)], pages=pages, rows=rows)
    results = []
    for graphs in (False, True):
        engine = create_engine(_config(checkpoint, graphs=graphs))
        results.append(run(engine, [plan]))
        engine.close()
    assert results[0] == results[1]


def _require_graphs(captured: Answer) -> None:
    if captured.stats.prefill_backend != "fa3":
        pytest.skip("no prefill backend that can be captured is here")
    assert captured.stats.graph_replays > captured.stats.eager_prefill_steps
