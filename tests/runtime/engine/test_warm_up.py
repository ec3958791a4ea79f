"""Kernels that steps of an engine launch, and those that its warm-up launches, on tensors without memory.

They are told apart as Triton tells them apart: it compiles a kernel anew for other types and constants, for integers
that are 1 or multiples of 16, and for pointers that are aligned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

pytest.importorskip("triton")

from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.config import EngineConfig
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.engine.start.dummy_steps import dummy_plan, run_eagerly, step_limits
from minisgl.engine.start.rehearsal import rehearsal_runner, rehearsal_texts, rehearse
from minisgl.engine.start.warm_up import plan_of_texts, warm_up_plans
from minisgl.kernels.build.triton import Architecture, Launches
from minisgl.models.config import ModelConfig
from minisgl.models.drafter import DrafterConfig
from support.numerics.random_plans import random_plans
from support.plans import Segment, make_plan, new_row

HOPPER = Architecture.parse("9.0a")

ENGINE = EngineConfig(model="", device="cuda")
# One of each kind of model, of step and of number of ranks; of further ones, benchmarks record that nothing is compiled
# after the start (`compiled_after_ready` in benchmarks/results/h200.json).
CASES = {
    "qwen3-0.6b": ENGINE,
    "qwen3-0.6b, odd vocabulary": replace(ENGINE, tensor_parallel=2),
    "qwen3-0.6b, draft head": ENGINE,
    "qwen3-30b-a3b": ENGINE,
    "gpt-oss-20b": ENGINE,
    "gpt-oss-20b, FP8 KV": replace(ENGINE, kv_cache_dtype="fp8"),
    "qwen3-30b-a3b, routing by scores": ENGINE,
    "qwen2.5-7b, four ranks": replace(ENGINE, tensor_parallel=4),
    "gemma-4-31b, shared layers": replace(ENGINE, tensor_parallel=2),
    "gemma-4-31b, FP8 KV": replace(ENGINE, kv_cache_dtype="fp8"),
    "gemma-4-26b-a4b": ENGINE,
    "qwen3.6-35b-a3b": ENGINE,
    "mistral-7b-v0.1, few rows": replace(ENGINE, max_running=7, page_size=16),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "odd vocabulary": {"vocab_size": 50257},
    "shared layers": {"num_kv_shared_layers": 20, "hidden_size_per_layer_input": 256},
    "routing by scores": {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 128},
}


def launched(case: str, seed: int) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Kernels that the warm-up launches, and those that random steps launch."""
    config, (name, _, variant) = CASES[case], case.partition(", ")
    model = ModelConfig.parse(BUILTIN_CONFIGS[name], overrides=VARIANTS.get(variant))
    drafter = _drafter(name) if variant == "draft head" else None
    warmed, needed = Launches(), Launches()
    with warmed.recorded(HOPPER):
        rehearse(model, config, drafter)
    with needed.recorded(HOPPER), rehearsal_runner(model, config, drafter) as runner:
        limits = step_limits(runner, max_step_tokens=config.max_step_tokens, max_model_len=model.max_model_len)
        # Besides random steps: 16 chunks of prompts, and prompts behind an odd number of rows.
        others = dummy_plan(limits, prompts=[1024]), dummy_plan(limits, decode=7, prompts=[100])
        for plan in (*random_plans(limits, 16, seed), *others):
            run_eagerly(runner, plan)
    return warmed.keys, needed.keys


def _drafter(target: str) -> DrafterConfig:
    special = {"mask_token_id": 0, "target_layer_ids": [1, 7, 13, 19, 25]}
    config = {"architectures": ["DFlashDraftModel"], "num_hidden_layers": 5, "block_size": 16, "dflash_config": special}
    return DrafterConfig.parse({**BUILTIN_CONFIGS[target], **config})


@pytest.mark.parametrize("case", CASES)
def test_steps_of_any_size_launch_only_kernels_of_the_warm_up(case: str) -> None:
    warmed, needed = launched(case, seed=len(case))
    assert len(needed) > 10
    assert sorted(needed - warmed) == []


def test_texts_of_any_length_launch_only_kernels_of_the_warm_up() -> None:
    model = ModelConfig.parse(BUILTIN_CONFIGS["bge-m3"], overrides={"num_hidden_layers": 2})
    warmed, needed = Launches(), Launches()
    with warmed.recorded(HOPPER):
        rehearse(model, ENGINE)
    generator = np.random.default_rng(0)
    with needed.recorded(HOPPER), rehearsal_texts(model, ENGINE) as texts:
        for count, longest in ((1, 3), (1, 12), (2, 20), (3, 40), (1, 300), (1, 8192), (7, 500), (200, 40)):
            texts.outputs(plan_of_texts(generator.integers(1, longest, count).tolist()))
    assert len(needed.keys) >= 5
    assert sorted(needed.keys - warmed.keys) == []


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
