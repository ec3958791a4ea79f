"""An engine on a CUDA device that verifies drafts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from minisgl.engine.cuda_engine import CudaEngine
from minisgl.scheduler.loop import StepLoop
from minisgl.scheduler.process import scheduler_config
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.step_output import StepOutput
from minisgl.wire.messages import Submit
from support.engines import create_engine
from support.messages import submit_of
from support.numerics.gpu_engine import engine_config

_DISTANCE = 0.25
"""Most by which a greedy token may be less likely than another one, in bfloat16: its logarithm."""


def _outputs(scheduler: Scheduler, engine: CudaEngine, submits: list[Submit]) -> list[StepOutput]:
    loop, outputs = StepLoop(scheduler, engine), []
    for submit in submits:
        scheduler.submit(submit)
    while scheduler.has_work:
        if (output := loop.step()) is not None:
            assert not output.failures
            outputs.append(output)
    return outputs


@pytest.mark.parametrize("rows", [1, 3, 12])
def test_accepted_drafts_are_the_most_likely_tokens(rows: int, checkpoint: Path) -> None:
    config = engine_config(checkpoint, max_running=16, num_pages=512, speculative="ngram")
    engine = create_engine(config)
    assert isinstance(engine, CudaEngine)
    options = scheduler_config(config, engine.limits)
    random = np.random.default_rng(rows)
    prompts = [random.integers(3, 500, 20 + 30 * row).astype(np.int32) for row in range(rows)]
    submits = [
        submit_of(
            id=bytes([row]) * 16, prompt=prompt.tobytes(), max_tokens=150, seed=0, temperature=0.0, ignore_eos=True
        )
        for row, prompt in enumerate(prompts)
    ]
    texts: list[list[int]] = []
    accepted = 0
    for _ in range(2):
        texts = [[] for _ in prompts]
        scheduler = Scheduler(options)
        for output in _outputs(scheduler, engine, submits):
            for request, token in zip(output.ids, output.tokens.tolist(), strict=True):
                texts[request.tobytes()[0]].append(token)
        accepted = scheduler.counters.accepted_draft_tokens
        predictions = [np.array(text, np.int32).tobytes() for text in texts]
        submits = [replace(each, prediction=text) for each, text in zip(submits, predictions, strict=True)]
    assert accepted > 50 * rows
    # The prompt's log-probabilities are those of a step without drafts.
    whole = [
        submit_of(
            id=bytes([row]) * 16,
            prompt=np.concatenate((prompt, np.array(text, np.int32))).tobytes(),
            max_tokens=1,
            seed=0,
            prompt_logprobs=1,
        )
        for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]
    for output in _outputs(Scheduler(options), engine, whole):
        for _, part in output.prompt_logprobs:
            first = max(len(prompts[part.id[0]]) - part.start, 0)
            chosen, best = (np.frombuffer(each, "<f4") for each in (part.logprobs.chosen, part.logprobs.top))
            assert (best - chosen)[first:].max(initial=0.0) <= _DISTANCE
    engine.close()
