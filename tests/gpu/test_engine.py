"""A whole engine on a CUDA device, with hand-built plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl.attention import select
from minisgl.attention.backend import BackendUnavailable
from minisgl.attention.split_backend import LongContexts
from minisgl.config import EngineConfig
from minisgl.errors import EngineError
from minisgl.toy.tiny import TINY_ARCHS
from minisgl.wire.plan import StepPlan
from support.engines import create_engine
from support.numerics.compare import ROUNDED
from support.numerics.gpu_engine import (
    Answer,
    answer,
    assert_bitwise_equal,
    assert_equal_where_the_gap_allows,
    engine_config,
    run,
)
from support.plans import Segment, make_plan, new_row

ROWS = 8
PROMPTS = [np.random.default_rng(i).integers(3, 500, 20 + 37 * i).tolist() for i in range(ROWS)]
PAGES = [(slot, index, slot * 8 + 7 - index) for slot in range(ROWS) for index in range(8)]


def _config(checkpoint: Path, **settings: object) -> EngineConfig:
    return engine_config(checkpoint, **({"num_pages": ROWS * 8, "max_running": ROWS} | settings))


def _plans(steps: int, rows: list[list[int]], decoded: int = ROWS) -> list[StepPlan]:
    """All prompts at once, then decode steps of `decoded` rows; the last row joins in a mixed step."""
    first = [Segment(slot, 0, prompt) for slot, prompt in enumerate(PROMPTS[:-1])]
    plans = [make_plan(0, prefill=first, pages=PAGES, rows=rows[:-1])]
    last = Segment(ROWS - 1, 0, PROMPTS[-1])
    decode = [(slot, len(PROMPTS[slot])) for slot in range(min(decoded, ROWS - 1))]
    plans.append(make_plan(1, decode=decode, prefill=[last], rows=rows[-1:]))
    for step in range(2, steps):
        decode = [(slot, len(PROMPTS[slot]) + step - 1 - (slot == ROWS - 1)) for slot in range(decoded)]
        plans.append(make_plan(step, decode=decode))
    return plans


def _greedy() -> list[list[int]]:
    return [new_row(slot) for slot in range(ROWS)]


def test_tokens_match_a_cpu_unless_logits_are_nearly_equal(checkpoint: Path) -> None:
    plans = _plans(24, _greedy())
    cpu = answer(_config(checkpoint, device="cpu", dtype="float32"), plans)
    assert_equal_where_the_gap_allows(plans, cpu, answer(_config(checkpoint), plans), distance=ROUNDED)


def _with_and_without_graphs(checkpoint: Path, backends: str) -> Iterator[tuple[list[StepPlan], Answer, Answer]]:
    """Run steps of each captured size, eagerly and replayed."""
    engines = []
    for largest in (0, ROWS):
        try:
            engines.append(create_engine(_config(checkpoint, cuda_graph_max_batch=largest, attention_backend=backends)))
        except BackendUnavailable as error:
            pytest.skip(str(error))
    if engines[0].stats.decode_backend == "torch":
        pytest.skip("no backend that can be captured is here")
    for decoded in (1, 2, 3, 4, 6, 8):
        plans = _plans(6, _greedy(), decoded)
        answers = []
        for engine in engines:
            logits: list[torch.Tensor] = []
            engine.runner.logits_hook = lambda plan, tapped, logits=logits: logits.append(tapped.clone().float().cpu())
            answers.append(Answer(run(engine, plans), logits, engine.stats))
        yield plans, answers[0], answers[1]
    counted = [(engine.stats.graph_replays, engine.stats.eager_decode_steps) for engine in engines]
    assert counted == [(0, 6 * 4), (6 * 4, 0)]
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("backends", ["auto", "flashinfer,xqa", "torch,xqa"])
def test_a_graph_is_bitwise_equal_to_an_eager_step(checkpoint: Path, backends: str) -> None:
    for _, eager, replayed in _with_and_without_graphs(checkpoint, backends):
        assert_bitwise_equal(eager, replayed)


@pytest.mark.parametrize("arch", TINY_ARCHS)
def test_a_graph_of_any_architecture_is_bitwise_equal_to_an_eager_step(
    arch: str, wide_checkpoint: Callable[[str], Path]
) -> None:
    for _, eager, replayed in _with_and_without_graphs(wide_checkpoint(arch), "auto"):
        assert_bitwise_equal(eager, replayed)


def test_graphs_of_long_contexts_are_bitwise_equal_to_eager_steps(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "LongContexts", lambda backend, least_bytes: LongContexts(backend, 1))
    for plans, eager, replayed in _with_and_without_graphs(checkpoint, "auto"):
        assert_bitwise_equal(eager, replayed)
        with monkeypatch.context() as context:
            context.setattr(select, "LongContexts", LongContexts)
            assert_equal_where_the_gap_allows(plans, answer(_config(checkpoint), plans), replayed)


def test_a_planned_decode_can_be_captured(checkpoint: Path) -> None:
    """flashinfer divides the work of a captured step differently from that of an eager one: not bitwise equal."""
    for plans, eager, replayed in _with_and_without_graphs(checkpoint, "flashinfer"):
        assert_equal_where_the_gap_allows(plans, eager, replayed)


def test_a_step_in_which_no_row_samples(checkpoint: Path) -> None:
    prompt = PROMPTS[3]
    plans = [
        make_plan(0, prefill=[Segment(0, 0, prompt[:70], sample=False)], pages=PAGES[:8], rows=[new_row(0)]),
        make_plan(1, prefill=[Segment(0, 70, prompt[70:])]),
        make_plan(2, decode=[(0, len(prompt))]),
    ]
    engine = create_engine(_config(checkpoint, audit=True))
    tokens = run(engine, plans)
    engine.close()
    assert [len(step) for step in tokens] == [0, 1, 1] and min(tokens[1] + tokens[2]) >= 0


def test_padding_rows_write_to_no_page_of_other_rows(checkpoint: Path) -> None:
    """Five rows run in the graph of six; unowned pages and unwritten positions are NaN."""
    plans = [*_plans(12, _greedy(), 5), make_plan(12, decode=[(7, len(PROMPTS[7]))])]
    eager = answer(_config(checkpoint, cuda_graph_max_batch=0, audit=True), plans)
    padded = answer(_config(checkpoint, audit=True), plans)
    assert all(token >= 0 for step in eager.tokens + padded.tokens for token in step)
    assert_equal_where_the_gap_allows(plans, eager, padded)


def test_sampled_tokens_do_not_depend_on_graph_padding_or_filtered_neighbours(checkpoint: Path) -> None:
    plain = [new_row(slot, temperature=1.0, seed=slot) for slot in range(ROWS)]
    mixed = [*plain[:4], *(new_row(slot, temperature=1.0, top_k=5, top_p=0.9, seed=slot) for slot in range(4, ROWS))]
    answers = []
    for rows in (plain, mixed):
        engine = create_engine(_config(checkpoint))
        answers.append(run(engine, _plans(16, rows)))
        assert engine.stats.eager_decode_steps == 0 or engine.stats.decode_backend == "torch"
        engine.close()
    assert [step[:4] for step in answers[0][2:]] == [step[:4] for step in answers[1][2:]]
    assert answers[0] != answers[1]


def test_the_pool_fills_its_share_of_the_device(checkpoint: Path) -> None:
    free, total = torch.cuda.mem_get_info()
    engine = create_engine(
        _config(checkpoint, num_pages=None, memory_fraction=0.3, max_running=256, max_model_len=None)
    )
    used = free - torch.cuda.mem_get_info()[0]
    assert engine.stats.kv_pool_bytes > 0 and used <= 0.3 * free + (2 << 30) <= total
    engine.close()


def test_no_step_runs_after_a_failed_one(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens would be wrong, since the failed step did not fill its part of the pool."""
    engine = create_engine(_config(checkpoint))
    plans = _plans(3, _greedy())

    def run_out_of_memory(*arguments: object) -> None:
        raise torch.OutOfMemoryError("no memory for a step")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(engine.runner, "run_model", run_out_of_memory)
        engine.launch(plans[0])
    with pytest.raises(EngineError, match="no memory for a step") as refused:
        engine.launch(plans[1])
    assert refused.value.code == "engine_failed"
    engine.close()


def test_a_closed_engine_frees_the_device(checkpoint: Path) -> None:
    before = torch.cuda.memory_reserved()
    engine = create_engine(_config(checkpoint, num_pages=8192))
    run(engine, _plans(4, _greedy()))
    assert torch.cuda.memory_reserved() - before > engine.stats.kv_pool_bytes
    engine.close()
    # torch's libraries keep workspaces.
    assert torch.cuda.memory_reserved() - before < engine.stats.kv_pool_bytes // 2


def test_poisoned_pages_fail_only_their_readers(checkpoint: Path) -> None:
    engine = create_engine(_config(checkpoint, audit=True))
    assert all(token >= 0 for step in run(engine, _plans(8, _greedy())) for token in step)
    decode = [(slot, len(PROMPTS[slot]) + 7 - (slot == ROWS - 1)) for slot in range(ROWS)]
    (tokens,) = run(engine, [make_plan(8, decode=decode, poison=[2 * 8 + 7])])
    assert [token < 0 for token in tokens] == [slot == 2 for slot in range(ROWS)]
    engine.close()
