"""Kernels that steps of an engine launch, and those that its warm-up launches, on tensors without memory.

They are told apart as Triton tells them apart: it compiles a kernel anew for other types and constants, for integers
that are 1 or multiples of 16, and for pointers that are aligned.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

pytest.importorskip("triton")

from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.config import EngineConfig
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.engine.rehearsal import rehearsal_runner, rehearse
from minisgl.engine.warm_up import (
    PLAIN,
    Sampling,
    StepLimits,
    run_eagerly,
    sized_plan,
    step_limits,
    warm_up_plans,
)
from minisgl.kernels.build.triton import Architecture, Launches
from minisgl.models.config import ModelConfig
from minisgl.wire.plan import StepPlan
from support.plans import Segment, make_plan, new_row

HOPPER = Architecture.parse("9.0a")


def random_plans(limits: StepLimits, count: int, seed: int) -> Iterator[StepPlan]:
    """Steps as a scheduler makes them: pure decode, prompts alone and behind prefixes, both together."""
    chance = random.Random(seed)

    def size(largest: int) -> int:
        return chance.choice([chance.randint(1, min(bound, largest)) for bound in (8, 40, 300, largest)])

    for _ in range(count):
        segments = chance.choice([0, 0, 1, 1, 2, chance.randint(1, 9)])
        tokens = size(limits.max_step_tokens)
        samplings = [Sampling(chance.random() < 0.5, chance.random() < 0.5) for _ in range(chance.randint(1, 7))]
        yield sized_plan(
            limits,
            decode=size(limits.max_running) if not segments else chance.choice([0, size(limits.max_running)]),
            prompts=[max(1, tokens // segments + chance.randint(-3, 3)) for _ in range(segments)],
            start=chance.choice([0, 0, chance.randint(1, limits.max_model_len)]),
            sample=chance.random() < 0.8,
            shared=chance.random() < 0.3,
            sampling=chance.choice([[], [PLAIN], samplings]),
        )


ENGINE = EngineConfig(model="", device="cuda")
CASES = {
    "qwen3-0.6b": ENGINE,
    "qwen3-0.6b, two ranks": replace(ENGINE, tensor_parallel=2),
    "qwen3-14b": ENGINE,
    "qwen3-30b-a3b": ENGINE,
    "llama-3.2-1b": ENGINE,
    "llama-3.2-1b, few rows": replace(ENGINE, max_running=7, page_size=16),
    "llama-3.1-8b": ENGINE,
    "qwen2.5-0.5b": ENGINE,
    "qwen2.5-7b, four ranks": replace(ENGINE, tensor_parallel=4),
    "mistral-7b-v0.1": ENGINE,
    "mistral-7b-v0.3": ENGINE,
}


def launched(case: str, seed: int) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Kernels that the warm-up launches, and those that random steps launch."""
    model, config = ModelConfig.parse(BUILTIN_CONFIGS[case.partition(",")[0]]), CASES[case]
    warmed, needed = Launches(), Launches()
    with warmed.recorded(HOPPER):
        rehearse(model, config)
    with needed.recorded(HOPPER), rehearsal_runner(model, config) as runner:
        limits = step_limits(runner, max_step_tokens=config.max_step_tokens, max_model_len=model.max_model_len)
        for plan in random_plans(limits, 40, seed):
            run_eagerly(runner, plan)
    return warmed.keys, needed.keys


@pytest.mark.parametrize("case", CASES)
def test_steps_of_any_size_launch_only_kernels_of_the_warm_up(case: str) -> None:
    warmed, needed = launched(case, seed=len(case))
    assert len(needed) > 10
    assert sorted(needed - warmed) == []


@pytest.mark.parametrize("limits", [{}, {"max_running": 1}, {"max_step_tokens": 3, "max_running": 3}])
def test_a_warm_up_leaves_no_trace(limits: dict[str, int], start: Callable[..., CpuEngine]) -> None:
    """On a CPU, where its steps are computed."""
    fresh, warmed = start(**limits), start(**limits)
    config = EngineConfig(model="", **limits)
    sizes = step_limits(warmed.runner, max_step_tokens=config.max_step_tokens, max_model_len=96 * 4)
    for plan in warm_up_plans(sizes):
        run_eagerly(warmed.runner, plan)
    plans = [
        make_plan(0, prefill=[Segment(0, 0, [5, 6, 7])], pages=[(0, 0, 3), (0, 1, 9)], rows=[new_row(0)]),
        *(make_plan(step, decode=[(0, 2 + step)]) for step in range(1, 6)),
    ]
    tokens = [[engine.collect(engine.launch(plan)).tokens.tolist() for plan in plans] for engine in (fresh, warmed)]
    assert tokens[0] == tokens[1]
