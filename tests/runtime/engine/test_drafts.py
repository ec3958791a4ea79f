"""An engine that verifies drafts generates what one generates that does not, token for token.

`make test-drafts` runs many more examples.
"""

from __future__ import annotations

import os
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl.engine.cpu_engine import CpuEngine
from minisgl.engine.start.dummy_steps import run_eagerly, step_limits
from minisgl.engine.start.warm_up import warm_up_plans
from minisgl.errors import EngineError
from minisgl.wire.messages import Submit
from support.messages import submit_of
from support.speculation import (
    MAX_MODEL_LEN,
    check_answers,
    engine_of,
    random_numbers,
    requests_to_draft,
    same_number,
    serve,
    with_prediction,
)
from support.tiny_checkpoint import tiny_checkpoint

_EXAMPLES: Final = int(os.environ.get("DRAFT_EXAMPLES", "8"))


@pytest.fixture(scope="module")
def plain() -> CpuEngine:
    return engine_of("off")


@given(
    requests=requests_to_draft(),
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
    expected, _ = serve(plain, requests)
    if wrong is not None:
        requests = [with_prediction(each, expected[each.id].tokens, wrong, random) for each in requests]
    numbers = None
    if fixed is not None:
        numbers = same_number(fixed) if isinstance(fixed, int) else random_numbers(random)
    engine = engine_of("ngram", num_pages=pages * 4 // page_size, page_size=page_size)
    aborted = {each.id: int(random.integers(1, 20)) for each in requests[:aborts]}
    answers, scheduler = serve(engine, requests, overlap=overlap, numbers=numbers, aborted=aborted)
    engine.close()
    check_answers(requests, answers, expected, aborted)
    assert scheduler.pages.used == 0


def test_a_true_prediction_takes_few_steps(plain: CpuEngine) -> None:
    prompt = np.arange(5, 25, dtype=np.int32).tobytes()
    submit = submit_of(id=b"1" * 16, prompt=prompt, max_tokens=80, temperature=0.9, seed=3, ignore_eos=True)
    expected, before = serve(plain, [submit])
    predicted = with_prediction(submit, expected[submit.id].tokens, 0.0, np.random.default_rng(0))
    engine = engine_of("ngram")
    answers, scheduler = serve(engine, [predicted])
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
    engine = engine_of("ngram", max_running=requests)
    limits = step_limits(engine.runner, max_step_tokens=64, max_model_len=MAX_MODEL_LEN)
    largest = 0
    for plan in warm_up_plans(limits):
        largest = max(largest, len(plan.decode_slots))
        run_eagerly(engine.runner, plan)
    assert largest == min(engine.limits.max_decode_rows // requests, 8) * requests
    engine.close()


def test_ngram_is_refused_where_it_cannot_be_used() -> None:
    window: dict[str, Any] = {"model": str(tiny_checkpoint("mistral")), "hf_overrides": {"sliding_window": 32}}
    with pytest.raises(EngineError, match="window") as raised:
        engine_of("ngram", **window)
    assert raised.value.code == "speculation_unsupported"
    engine = engine_of("auto", **window)
    assert not engine.limits.most_drafts
    engine.close()
