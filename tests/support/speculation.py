"""Engines that speculate, and requests that they answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from msgspec.structs import replace

from minisgl.config import EngineConfig
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.scheduler.loop import StepLoop
from minisgl.scheduler.process import scheduler_config
from minisgl.scheduler.scheduler import Scheduler
from minisgl.wire.messages import FINISH_REASONS, Submit
from minisgl.wire.plan import IntArray
from support.engines import create_engine
from support.messages import submit_of
from support.scheduler_audit import check
from support.tiny_checkpoint import tiny_checkpoint

MAX_MODEL_LEN: Final = 160
_FILTERS: Final[list[dict[str, Any]]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.2, "min_p": 0.02},
    {"temperature": 0.8, "min_tokens": 20},
    {"temperature": 0.0, "logprobs": 2, "logit_bias": {7: 2.5, 9: -50.0}},
    {"temperature": 0.9, "top_p": 0.9, "logprobs": 0, "prompt_logprobs": 1},
    # Their rows have no drafts.
    {"temperature": 0.0, "repetition_penalty": 1.1},
]


@dataclass
class Answer:
    """What a request got."""

    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    scores: list[float] = field(default_factory=list)
    """Log-probabilities of the tokens, where the request wants them."""
    predicted: tuple[int, int] = (0, 0)


def engine_of(speculative: str, **options: Any) -> CpuEngine:
    """A small engine in float32, with audit."""
    torch.set_num_threads(1)
    config: dict[str, Any] = {"model": str(tiny_checkpoint()), "device": "cpu", "page_size": 4, "num_pages": 512}
    config |= {"max_running": 6, "max_model_len": MAX_MODEL_LEN, "max_step_tokens": 64, "audit": True, **options}
    engine = create_engine(EngineConfig(speculative=speculative, **config))  # type: ignore[arg-type]
    assert isinstance(engine, CpuEngine)
    return engine


def serve(
    engine: CpuEngine,
    submits: list[Submit],
    *,
    overlap: bool = True,
    numbers: Callable[[IntArray, IntArray], IntArray] | None = None,
    aborted: dict[bytes, int] | None = None,
) -> tuple[dict[bytes, Answer], Scheduler]:
    """Answers by request. `numbers` decides on the drafts of each row. `aborted`: requests that are aborted after so
    many tokens."""
    options = EngineConfig(model="", overlap=overlap, audit=True, max_step_tokens=64)
    scheduler = Scheduler(scheduler_config(options, engine.limits))
    if numbers is not None:
        scheduler.drafts._numbers = numbers  # type: ignore[method-assign, assignment]
    # All steps take the same time, or those of a busy machine would decide how many drafts pay.
    ticks = itertools.count()
    loop = StepLoop(scheduler, engine, lambda: next(ticks) / 1000)
    answers = {submit.id: Answer() for submit in submits}
    for submit in submits:
        scheduler.submit(submit)
    while scheduler.has_work:
        output = loop.step()
        check(scheduler)
        if output is None:
            continue
        assert not output.failures
        for row, request_id in enumerate(output.ids):
            answer = answers[request_id.tobytes()]
            assert answer.finish is None and output.index[row] == len(answer.tokens)
            answer.tokens.append(int(output.tokens[row]))
            answer.finish = FINISH_REASONS[output.finish[row]]
            if (logprobs := output.logprobs.get(row)) is not None:
                answer.scores += np.frombuffer(logprobs.chosen, "<f4").tolist()
            answer.predicted = output.predicted.get(row, answer.predicted)
        for request_id, most in (aborted or {}).items():
            if len(answers[request_id].tokens) >= most:
                scheduler.abort(request_id)
    return answers, scheduler


def same_number(count: int) -> Callable[[IntArray, IntArray], IntArray]:
    """`numbers` of `serve`: so many drafts of each row."""
    return lambda slots, most: np.clip(most, 0, count).astype(np.int32)


def random_numbers(random: np.random.Generator) -> Callable[[IntArray, IntArray], IntArray]:
    """`numbers` of `serve`: any number of drafts of each row."""
    return lambda slots, most: random.integers(0, np.maximum(most, 0) + 1, dtype=np.int32)


def check_answers(
    requests: list[Submit], found: dict[bytes, Answer], expected: dict[bytes, Answer], aborted: Collection[bytes]
) -> None:
    """Check that the answers to all requests are the `expected` ones; those to `aborted` ones may end early."""
    for submit in requests:
        answer, known = found[submit.id], expected[submit.id]
        if submit.id in aborted and answer.finish is None:
            assert answer.tokens == known.tokens[: len(answer.tokens)]
        else:
            assert (answer.tokens, answer.finish) == (known.tokens, known.finish)
            assert answer.scores == pytest.approx(known.scores, abs=1e-4)


@st.composite
def requests_to_draft(draw: st.DrawFn) -> list[Submit]:
    """Requests of all kinds of sampling, with prompts that repeat more or less."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    found = []
    for number in range(draw(st.integers(1, 10))):
        options = draw(st.sampled_from(_FILTERS))
        alphabet = draw(st.sampled_from([3, 20, 400]))
        prompt = random.integers(3, 3 + alphabet, draw(st.integers(1, 60)))
        found.append(
            submit_of(
                id=number.to_bytes(16, "big"),
                prompt=prompt.astype(np.int32).tobytes(),
                max_tokens=draw(st.integers(options.get("min_tokens", 1), 90)),
                seed=draw(st.integers(0, 5)),
                ignore_eos=draw(st.booleans()),
                stop_token_ids=tuple(random.integers(3, 500, draw(st.sampled_from([0, 0, 4]))).tolist()),
                **options,
            )
        )
    return found


def with_prediction(submit: Submit, tokens: list[int], wrong: float, random: np.random.Generator) -> Submit:
    """The request with a prediction of its answer, of which a share of tokens is `wrong`."""
    changed = np.where(random.random(len(tokens)) < wrong, 3, tokens)
    return replace(submit, prediction=changed.astype(np.int32).tobytes())
