"""An engine that verifies drafts generates what one generates that does not, token for token.

`make test-drafts` runs many more examples.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from minisgl.config import EngineConfig
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.engine.start.dummy_steps import run_eagerly, step_limits
from minisgl.engine.start.warm_up import warm_up_plans
from minisgl.errors import EngineError
from minisgl.scheduler.loop import StepLoop
from minisgl.scheduler.process import scheduler_config
from minisgl.scheduler.scheduler import Scheduler
from minisgl.wire.messages import FINISH_REASONS, Submit
from minisgl.wire.plan import IntArray
from support.engines import create_engine
from support.messages import submit_of
from support.scheduler_audit import check
from support.tiny_checkpoint import tiny_checkpoint

_EXAMPLES: Final = int(os.environ.get("DRAFT_EXAMPLES", "8"))
_MAX_MODEL_LEN: Final = 160
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
class _Answer:
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    scores: list[float] = field(default_factory=list)
    """Log-probabilities of the tokens, where the request wants them."""
    predicted: tuple[int, int] = (0, 0)


def _engine(speculative: str, **options: Any) -> CpuEngine:
    torch.set_num_threads(1)
    config: dict[str, Any] = {"model": str(tiny_checkpoint()), "device": "cpu", "page_size": 4, "num_pages": 512}
    config |= {"max_running": 6, "max_model_len": _MAX_MODEL_LEN, "max_step_tokens": 64, "audit": True, **options}
    engine = create_engine(EngineConfig(speculative=speculative, **config))  # type: ignore[arg-type]
    assert isinstance(engine, CpuEngine)
    return engine


def _serve(
    engine: CpuEngine,
    submits: list[Submit],
    *,
    overlap: bool = True,
    numbers: Callable[[IntArray, IntArray], IntArray] | None = None,
    aborted: dict[bytes, int] | None = None,
) -> tuple[dict[bytes, _Answer], Scheduler]:
    """Answers by request. `numbers` decides on the drafts of each row. `aborted`: requests that are aborted after so
    many tokens."""
    options = EngineConfig(model="", overlap=overlap, audit=True, max_step_tokens=64)
    scheduler = Scheduler(scheduler_config(options, engine.limits))
    if numbers is not None:
        scheduler.drafts._numbers = numbers  # type: ignore[method-assign]
    # All steps take the same time, or those of a busy machine would decide how many drafts pay.
    ticks = itertools.count()
    loop = StepLoop(scheduler, engine, lambda: next(ticks) / 1000)
    answers = {submit.id: _Answer() for submit in submits}
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


@st.composite
def _requests(draw: st.DrawFn) -> list[Submit]:
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


def _with_prediction(submit: Submit, tokens: list[int], wrong: float, random: np.random.Generator) -> Submit:
    """The request with a prediction of its answer, of which a share of tokens is `wrong`."""
    changed = np.where(random.random(len(tokens)) < wrong, 3, tokens)
    return replace(submit, prediction=changed.astype(np.int32).tobytes())


@pytest.fixture(scope="module")
def plain() -> CpuEngine:
    return _engine("off")


@given(
    requests=_requests(),
    wrong=st.sampled_from([None, 0.0, 0.1, 0.3, 1.0]),
    overlap=st.booleans(),
    fixed=st.sampled_from([None, "random", 1, 7]),
    pages=st.sampled_from([40, 60, 512]),
    page_size=st.sampled_from([1, 4, 16]),
    aborts=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
@settings(max_examples=_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_drafts_change_no_answer(
    plain: CpuEngine,
    requests: list[Submit],
    wrong: float | None,
    overlap: bool,
    fixed: str | int | None,
    pages: int,
    page_size: int,
    aborts: int,
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    expected, _ = _serve(plain, requests)
    if wrong is not None:
        requests = [_with_prediction(each, expected[each.id].tokens, wrong, random) for each in requests]
    numbers = None
    if fixed == "random":
        numbers = lambda slots, most: random.integers(0, np.maximum(most, 0) + 1, dtype=np.int32)  # noqa: E731
    elif fixed is not None:
        numbers = lambda slots, most: np.clip(most, 0, int(fixed)).astype(np.int32)  # noqa: E731
    engine = _engine("ngram", num_pages=pages * 4 // page_size, page_size=page_size)
    aborted = {each.id: int(random.integers(1, 20)) for each in requests[:aborts]}
    answers, scheduler = _serve(engine, requests, overlap=overlap, numbers=numbers, aborted=aborted)
    engine.close()
    for submit in requests:
        known, found = expected[submit.id], answers[submit.id]
        if submit.id in aborted and found.finish is None:
            assert found.tokens == known.tokens[: len(found.tokens)]
        else:
            assert (found.tokens, found.finish) == (known.tokens, known.finish)
            assert found.scores == pytest.approx(known.scores, abs=1e-4)
    assert scheduler.pages.used == 0


def test_a_true_prediction_takes_few_steps(plain: CpuEngine) -> None:
    prompt = np.arange(5, 25, dtype=np.int32).tobytes()
    submit = submit_of(id=b"1" * 16, prompt=prompt, max_tokens=80, temperature=0.9, seed=3, ignore_eos=True)
    expected, before = _serve(plain, [submit])
    predicted = _with_prediction(submit, expected[submit.id].tokens, 0.0, np.random.default_rng(0))
    engine = _engine("ngram")
    answers, scheduler = _serve(engine, [predicted])
    assert answers[submit.id].tokens == expected[submit.id].tokens
    accepted, rejected = answers[submit.id].predicted
    assert accepted >= 60 and rejected <= 10
    assert scheduler.counters.steps < before.counters.steps / 3
    counters = scheduler.counters
    assert counters.accepted_predicted_tokens == accepted == counters.accepted_draft_tokens
    assert sum(counters.accepted_by_place) == accepted
    engine.close()


@pytest.mark.parametrize("requests", [1, 6, 40])
def test_the_warm_up_has_steps_of_as_many_rows_as_drafts_make(requests: int) -> None:
    engine = _engine("ngram", max_running=requests)
    limits = step_limits(engine.runner, max_step_tokens=64, max_model_len=_MAX_MODEL_LEN)
    largest = 0
    for plan in warm_up_plans(limits):
        largest = max(largest, len(plan.decode_slots))
        run_eagerly(engine.runner, plan)
    assert largest == min(engine.limits.max_decode_rows // requests, 8) * requests
    engine.close()


def test_ngram_is_refused_where_it_cannot_be_used() -> None:
    window: dict[str, Any] = {"model": str(tiny_checkpoint("mistral")), "hf_overrides": {"sliding_window": 32}}
    with pytest.raises(EngineError, match="window") as raised:
        _engine("ngram", **window)
    assert raised.value.code == "speculation_unsupported"
    engine = _engine("auto", **window)
    assert not engine.limits.most_drafts
    engine.close()
