"""Logits processors, log-probabilities and cache salts: validation, encoding in plans, and results."""

from __future__ import annotations

import math
from typing import Any

import pytest

from minisgl.scheduler import admission
from minisgl.scheduler import logprobs as logprobs_module
from minisgl.scheduler.step_output import RequestError
from support.scheduling import EOS, VOCAB, Harness

OVERLAP = pytest.mark.parametrize("overlap", [True, False])


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"min_tokens": -1}, "invalid_request"),
        ({"min_tokens": 9}, "invalid_request"),
        ({"presence_penalty": math.nan}, "invalid_request"),
        ({"frequency_penalty": -math.inf}, "invalid_request"),
        ({"presence_penalty": 1e30}, "invalid_request"),
        ({"repetition_penalty": 0.0}, "invalid_request"),
        ({"repetition_penalty": -1.0}, "invalid_request"),
        ({"repetition_penalty": math.nan}, "invalid_request"),
        ({"repetition_penalty": math.inf}, "invalid_request"),
        ({"logit_bias": {VOCAB: 1.0}}, "invalid_token"),
        ({"logit_bias": {-1: 1.0}}, "invalid_token"),
        ({"logit_bias": {3: math.nan}}, "invalid_request"),
        ({"logit_bias": {3: math.inf}}, "invalid_request"),
        ({"logit_bias": {token: 1.0 for token in range(1025)}}, "invalid_request"),
        ({"logprobs": -2}, "invalid_request"),
        ({"logprobs": 129}, "invalid_request"),
        ({"prompt_logprobs": 129}, "invalid_request"),
        ({"prompt_logprobs": -2}, "invalid_request"),
        ({"cache_salt": bytes(1025)}, "invalid_request"),
    ],
)
def test_parameters_out_of_range_are_rejected(fields: dict[str, Any], code: str) -> None:
    harness = Harness()
    with pytest.raises(RequestError) as refused:
        harness.submit([1, 2], 8, **fields)
    assert refused.value.code == code
    harness.check_idle()


def test_plain_requests_have_no_logits_processors() -> None:
    harness = Harness()
    harness.submit([1, 2], 8, stop_token_ids=(5,), cache_salt=b"x")
    harness.submit([1, 2], 8, min_tokens=3, ignore_eos=True)
    plan = harness.scheduler.plan()
    assert plan is not None and len(plan.logits_processors) == 0


def test_logits_processors_are_part_of_the_plan_in_which_the_row_joins() -> None:
    harness = Harness(overlap=False, budget=3)
    harness.submit(
        [1, 2, 3, 4, 5],
        8,
        output=b"\x06\0\0\0",
        min_tokens=3,
        stop_token_ids=(9, VOCAB),
        presence_penalty=0.5,
        logit_bias={4: -1.5},
        logprobs=2,
    )
    harness.step()
    (row,) = harness.engine.processors.values()
    assert sorted(row.masked_ids.tolist()) == sorted([9, *EOS])
    assert (row.bias_ids.tolist(), row.bias_values.tolist()) == ([4], [-1.5])
    assert (row.prompt.tolist(), row.output.tolist()) == ([1, 2, 3, 4, 5], [6])
    assert (row.presence, row.frequency, row.repetition) == (0.5, 0.0, 1.0)
    assert (row.min_tokens, row.logprobs, row.prompt_logprobs) == (3, 2, -1)
    assert (row.slot, row.prompt_length) == (0, 5)


def test_history_is_sent_only_when_a_processor_needs_it() -> None:
    harness = Harness(overlap=False)
    harness.submit([1, 2, 3], 4, logprobs=0)
    harness.step()
    (row,) = harness.engine.processors.values()
    assert len(row.prompt) == len(row.output) == 0


@OVERLAP
@pytest.mark.parametrize("budget", [1, 3, 100])
def test_log_probabilities_reach_the_requests_that_want_them(overlap: bool, budget: int) -> None:
    harness = Harness(overlap=overlap, budget=budget)
    prompt = list(range(20, 33))
    asked = [(None, None), (0, None), (3, 2), (None, 0), (1, 5)]
    answers = [
        harness.submit(prompt, 6, ignore_eos=True, logprobs=of_answer, prompt_logprobs=of_prompt)
        for of_answer, of_prompt in asked
    ]
    harness.run()
    for answer, (of_answer, of_prompt) in zip(answers, asked, strict=True):
        assert len(answer.scores) == (0 if of_answer is None else 6)
        assert len(answer.prompt_scores) == (0 if of_prompt is None else 12)
        assert answer.cached == 0 or of_prompt is None
        answer.check_scores()
    harness.check_idle()


def test_a_prompt_of_one_token_has_no_log_probabilities() -> None:
    harness = Harness()
    answer = harness.submit([5], 2, ignore_eos=True, prompt_logprobs=1)
    harness.run()
    assert answer.prompt_scores == []
    assert len(answer.tokens) == 2


def test_prompt_log_probabilities_are_sent_in_messages_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs_module, "MESSAGE_TOKENS", 4)
    harness = Harness(budget=100)
    answer = harness.submit(list(range(20, 30)), 1, prompt_logprobs=1, ignore_eos=True)
    outputs = [output for _ in range(4) if (output := harness.step()) is not None]
    messages = [message for output in outputs for _, message in output.prompt_logprobs]
    assert [message.start for message in messages] == [1, 5, 9]
    answer.check_scores()


@OVERLAP
def test_a_preempted_prompt_reports_each_log_probability_once(overlap: bool) -> None:
    """The harness rejects log-probabilities that are repeated or out of order."""
    harness = Harness(pages=13, page_size=2, rows=4, max_model_len=26, budget=5, overlap=overlap)
    answers = [harness.submit([i, 2, 3, 4, 5, 6], 18, ignore_eos=True, prompt_logprobs=0, logprobs=0) for i in range(6)]
    harness.run()
    assert harness.scheduler.counters.preemptions > 0
    for answer in answers:
        assert answer.tokens == answer.expected()
        answer.check_scores()
    harness.check_idle()


@OVERLAP
def test_a_request_preempted_in_its_prompt_continues_its_log_probabilities(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "GROWTH_SHARE_START", 0.0)
    harness = Harness(pages=32, page_size=1, rows=3, max_model_len=32, budget=2, overlap=overlap)
    runner = harness.submit([1], 30, ignore_eos=True, priority=1)
    harness.step()
    scored = harness.submit(list(range(20, 44)), 2, ignore_eos=True, prompt_logprobs=0)
    harness.run()
    assert harness.scheduler.counters.preemptions > 0
    assert runner.tokens == runner.expected()
    assert scored.tokens == scored.expected()
    scored.check_scores()


@OVERLAP
def test_ended_and_failed_rows_report_no_log_probabilities(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    failing = harness.submit([1, 2, 3], 8, ignore_eos=True, logprobs=1)
    aborted = harness.submit([1, 2, 4], 8, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    going = harness.submit([1, 2, 5], 8, ignore_eos=True, logprobs=1)
    for _ in range(3):
        harness.step()
    harness.engine.fail_logits_of = {0}
    harness.abort(aborted)
    harness.run()
    assert failing.failure is not None
    assert failing.scores == failing.tokens
    assert len(going.scores) == 8
    going.check_scores()
    harness.check_idle()


def test_prefixes_are_shared_only_under_the_same_salt() -> None:
    harness = Harness()
    prompt = list(range(20, 29))
    first = {}
    for salt in (b"", b"a", b"b"):
        first[salt] = harness.submit(prompt, 2, ignore_eos=True, cache_salt=salt)
        harness.run()
        assert first[salt].cached == 0
    for salt in (b"", b"a", b"b"):
        again = harness.submit(prompt, 2, ignore_eos=True, cache_salt=salt)
        harness.run()
        assert again.cached == 8
        assert again.tokens == first[salt].tokens
    harness.check_idle()


def test_a_salt_is_dropped_with_its_last_page() -> None:
    harness = Harness(pages=16, page_size=4, max_model_len=64)
    cache: Any = harness.scheduler.pages.cache
    for salt in (b"a", b"b"):
        harness.submit(list(range(20, 29)), 2, ignore_eos=True, cache_salt=salt)
        harness.run()
    assert set(cache.salted) == {b"a", b"b"}
    # Shorter than a page: nothing of it is cached.
    harness.submit([1], 1, ignore_eos=True, cache_salt=b"c")
    harness.run()
    assert set(cache.salted) == {b"a", b"b"}
    harness.submit(list(range(30, 90)), 4, ignore_eos=True)
    harness.run()
    assert not cache.salted
    harness.check_idle()
