"""Random steps of an engine, and an engine that runs some: `python -m support.numerics.random_plans CHECKPOINT` prints
its statistics as JSON. A process of its own starts without kernels that others have compiled or loaded."""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from minisgl.engine.cuda_engine import CudaEngine
from minisgl.engine.engine import create_engine
from minisgl.engine.start.dummy_steps import PLAIN, Sampling, StepLimits, dummy_plan
from minisgl.wire.plan import EMPTY, IntArray, StepPlan
from support.numerics.gpu_engine import engine_config


def random_plans(limits: StepLimits, count: int, seed: int) -> Iterator[StepPlan]:
    """Steps as a scheduler makes them: pure decode, prompts alone and behind prefixes, both together."""
    chance = random.Random(seed)

    def size(largest: int) -> int:
        return chance.choice([chance.randint(1, min(bound, largest)) for bound in (8, 40, 300, largest)])

    for _ in range(count):
        segments = chance.choice([0, 0, 1, 1, 2, chance.randint(1, 9)])
        tokens = size(limits.max_step_tokens)
        samplings = [Sampling(*(chance.random() < 0.4 for _ in Sampling._fields)) for _ in range(chance.randint(1, 7))]
        yield dummy_plan(
            limits,
            decode=size(limits.max_running) if not segments else chance.choice([0, size(limits.max_running)]),
            prompts=[max(1, tokens // segments + chance.randint(-3, 3)) for _ in range(segments)],
            start=chance.choice([0, 0, chance.randint(1, limits.max_model_len)]),
            sample=chance.random() < 0.8,
            shared=chance.random() < 0.3,
            long=chance.random() < 0.3,
            sampling=chance.choice([[], [PLAIN], samplings]),
        )


def late_slots(handle: Any) -> IntArray:
    """Slots of the rows of a launched step that wait for masks."""
    slots: IntArray = EMPTY
    if handle.queued is not None:
        slots = handle.queued.slots
    elif handle.unsampled is not None:
        slots = handle.unsampled[1].packed.processors.late_slots
    return slots


def main(checkpoint: str) -> None:
    logging.basicConfig(level=logging.INFO)
    config = engine_config(Path(checkpoint), num_pages=64, max_running=40, cuda_graph_max_tokens=2048)
    engine = create_engine(config)
    limits = engine.limits
    steps = StepLimits(
        max_running=limits.max_running,
        max_step_tokens=config.max_step_tokens,
        max_model_len=limits.max_model_len,
        page_size=limits.page_size,
        dummy_page=limits.num_pages,
        dummy_window_page=None if limits.window is None else limits.num_window_pages,
        decode_rows=limits.max_running,
    )
    assert isinstance(engine, CudaEngine)
    for plan in random_plans(steps, 60, seed=1):
        handle = engine.launch(plan)
        if rows := len(late_slots(handle)):
            masks = engine.mask_memory(rows)
            masks[:] = -1
            engine.sample(handle, masks)
        engine.collect(handle)
    print(json.dumps(msgspec.to_builtins(engine.stats)))
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1])
