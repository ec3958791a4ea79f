"""A whole engine that executes hand-built plans, and its results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from minisgl.config import EngineConfig
from minisgl.engine.interface import Engine, EngineStats
from minisgl.wire.plan import StepPlan
from support.engines import create_engine
from support.numerics.compare import ROUNDED

BOTH_ROUNDED: Final = math.sqrt(2) * ROUNDED
"""Largest distance of two runs in bfloat16, whose errors are independent."""


@dataclass
class Answer:
    tokens: list[list[int]]
    logits: list[torch.Tensor]
    stats: EngineStats


def engine_config(checkpoint: Path, **settings: object) -> EngineConfig:
    defaults = {
        "model": str(checkpoint),
        "device": "cuda",
        "dtype": "bfloat16",
        "page_size": 64,
        "max_step_tokens": 2048,
        # Padding changes how products are rounded, so captured prompts are not bitwise equal to others.
        "cuda_graph_max_tokens": 0,
    }
    return EngineConfig(**(defaults | settings))  # type: ignore[arg-type]


def run(engine: Engine, plans: Sequence[StepPlan]) -> list[list[int]]:
    """Run plans, two in flight at a time. Returns the sampled tokens of each plan."""
    tokens, pending = [], []
    for plan in plans:
        pending.append(engine.launch(plan))
        if len(pending) == 2:
            tokens.append(engine.collect(pending.pop(0)).tokens.tolist())
    return tokens + [engine.collect(handle).tokens.tolist() for handle in pending]


def answer(config: EngineConfig, plans: Sequence[StepPlan]) -> Answer:
    engine = create_engine(config)
    # A step that samples nothing has no logits.
    logits = {plan.step: torch.empty(0) for plan in plans}
    engine.runner.logits_hook = lambda plan, tapped: logits.update({plan.step: tapped.clone().float().cpu()})
    result = Answer(run(engine, plans), list(logits.values()), engine.stats)
    engine.close()
    return result


def assert_bitwise_equal(expected: Answer, actual: Answer) -> None:
    assert actual.tokens == expected.tokens
    for ours, theirs in zip(actual.logits, expected.logits, strict=True):
        assert torch.equal(ours, theirs)


def assert_equal_where_the_gap_allows(
    plans: Sequence[StepPlan], expected: Answer, actual: Answer, *, distance: float = BOTH_ROUNDED
) -> None:
    """Check that logits agree as long as the tokens before them do; the first token that differs must be a near tie.
    `distance`: of all that is compared, relative to its size (L2); `ROUNDED` where `expected` is float32's."""
    parted: set[int] = set()
    compared = 0
    error_squares = squares = 0.0
    answers = (expected.logits, actual.logits, expected.tokens, actual.tokens)
    for plan, reference, logits, reference_tokens, tokens in zip(plans, *answers, strict=True):
        for row, slot in enumerate(plan.sampled_slots.tolist()):
            if slot in parted:
                continue
            compared += 1
            error = logits[row] - reference[row]
            assert float(error.norm() / reference[row].norm()) < 3e-2
            error_squares += float(error.square().sum())
            squares += float(reference[row].square().sum())
            if reference_tokens[row] != tokens[row]:
                best, second = reference[row].topk(2).values.tolist()
                assert best - second <= 2 * float(error.abs().max())
                parted.add(slot)
    assert math.sqrt(error_squares / squares) <= distance
    assert compared > sum(len(plan.sampled_slots) for plan in plans) // 2
