"""Steps padded to the size of a graph, computed kernel by kernel on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl.engine.batch import PackedStep, StepSize
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.wire.plan import StepPlan
from support.numerics.mixed_steps import MixedSteps

STEPS = MixedSteps(rows=6, page_size=4, longest_prompt=24, longest_chunk=11, most_tokens=40, joining=2)


@pytest.fixture
def engines(start: Callable[..., CpuEngine]) -> tuple[CpuEngine, CpuEngine]:
    plain, padded = (start(num_pages=STEPS.num_pages, max_running=STEPS.rows, page_size=4) for _ in range(2))
    return plain, padded


def _size(plan: StepPlan, decode: int, tokens: int, segments: int) -> StepSize:
    """The step's size and so much padding."""
    prefill = len(plan.prefill_tokens)
    # A captured step has prompts or not, whatever its padding.
    if not prefill:
        return StepSize(len(plan.decode_slots) + decode)
    return StepSize(len(plan.decode_slots) + decode, prefill + tokens, len(plan.prefill_slots) + segments)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), seed=st.integers(0, 1 << 30))
def test_padding_changes_no_token_logit_or_page(
    engines: tuple[CpuEngine, CpuEngine], data: st.DataObject, seed: int
) -> None:
    tables = [engine.runner.tables for engine in engines]
    for plan in STEPS.plans(seed, 14):
        padding = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 2)), "padding")
        packed = [PackedStep(plan, tables[0]), PackedStep(plan, tables[1], _size(plan, *padding))]
        logits: list[torch.Tensor] = []
        results = []
        for engine, step in zip(engines, packed, strict=True):
            engine.runner.logits_hook = lambda plan, tapped, seen=logits: seen.append(tapped.clone())
            with torch.inference_mode():
                plain = engine.runner.run_model(plan, step, step.view(step.on_host()))
                results.append(engine.runner.resample(plain).tokens)
        sampled = packed[0].sampled
        assert packed[1].sampled == sampled and results[0].tolist() == results[1][:sampled].tolist()
        if sampled:
            torch.testing.assert_close(logits[1][:sampled], logits[0], rtol=1e-4, atol=1e-4)
    pools = [group.keys for engine in engines for group in engine.runner.kv.groups]
    for theirs, ours in zip(*pools, strict=True):
        torch.testing.assert_close(ours[:-1], theirs[:-1], rtol=1e-4, atol=1e-4, equal_nan=True)
        assert ours[-1].isfinite().all()


def test_all_inputs_of_a_size_have_the_same_offsets(engines: tuple[CpuEngine, CpuEngine]) -> None:
    places = set()
    for plan in STEPS.plans(1, 30):
        if len(plan.prefill_tokens):
            packed = PackedStep(plan, engines[0].runner.tables, StepSize(8, 80, 6))
            step = packed.view(packed.on_host())
            assert (step.prefill_kv_lengths >= 0).all() and step.query_offsets[-1] == 80
            parts = (getattr(step, name) for name in type(step).__dataclass_fields__ if name != "cascade")
            offsets = [part.storage_offset() for part in parts if isinstance(part, torch.Tensor)][:11]
            places.add((packed.graph_size, *offsets))
    assert len(places) == 1
