"""Constrained requests: masks by definition, and their way through the scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.scheduler.constrained import COMPILE_PATIENCE
from minisgl.scheduler.constraints import (
    Constraint,
    ConstraintError,
    Vocabulary,
    advance_all,
    consume_tokens,
    fill_masks,
    note_open,
    open_first,
)
from minisgl.scheduler.step_output import RequestError
from minisgl.wire.messages import Submit, Thinking
from support.constrained import ToyGrammar, ToyGrammars, ToyMatcher, allowed_tokens, eos_ends
from support.messages import submit_of
from support.scheduling import EOS, VOCAB, Answer, Harness

OVERLAP = pytest.mark.parametrize("overlap", [True, False])
GRAMMAR = ToyGrammar(factor=3, length=9, least=4)
MARKERS = Thinking(start=(50,), end=(60,))

few_tokens = st.sampled_from([1, 2, 3, 5, 7, 50, 51, 60, 61])
grammars = st.builds(ToyGrammar, factor=st.integers(1, 5), length=st.integers(0, 6), least=st.integers(0, 6))
markers = st.lists(st.sampled_from([50, 51, 60, 61]), min_size=1, max_size=3).map(tuple)
thinkings = st.builds(Thinking, start=markers, end=markers, is_open=st.booleans(), budget=st.integers(-1, 5))
constraints = st.fixed_dictionaries(
    {},
    optional={
        "grammar": grammars.map(lambda grammar: grammar.text),
        "thinking": thinkings,
        "allowed_token_ids": st.lists(few_tokens, max_size=5).map(tuple),
        "bad_words": st.lists(st.lists(few_tokens, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
        "min_tokens": st.integers(0, 4),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(few_tokens, max_size=2).map(tuple),
    },
)


def message(**options: Any) -> Submit:
    return submit_of(id=bytes(16), prompt=bytes(4), max_tokens=20, seed=0, **options)


def tokens_of(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


@settings(max_examples=500, deadline=None)
@given(options=constraints, data=st.data())
def test_masks_allow_what_the_definition_allows(options: dict[str, Any], data: st.DataObject) -> None:
    submit, vocabulary = message(**options), Vocabulary(VOCAB, EOS)
    if not submit.is_constrained:
        assert allowed_tokens(submit, [], VOCAB, EOS) == set(range(VOCAB))
        return
    toy: Any = ToyGrammars(VOCAB)
    matcher: Any = None
    if submit.constraint.grammar:
        toy.start(None, submit, vocabulary)
        toy.compile(1)
        matcher = toy.matchers[0]
    constraint = Constraint(submit, vocabulary, matcher)
    output: list[int] = []
    for _ in range(12):
        masks = np.full((2, vocabulary.words), 0x12345678, np.int32)
        errors = fill_masks({0: None, 1: constraint}, masks, vocabulary, toy)
        expected = allowed_tokens(submit, output, VOCAB, EOS)
        assert tokens_of(masks[0]) == set(range(VOCAB))
        assert tokens_of(masks[1]) == (expected or set(range(VOCAB)))
        assert {row: error.code for row, error in errors.items()} == ({} if expected else {1: "no_allowed_token"})
        if errors:
            return
        preferred = sorted(expected & {1, 2, 3, 50, 51, 60, 61}) or sorted(expected)
        token = data.draw(st.sampled_from(preferred))
        if token in submit.params.stop_token_ids or (token in EOS and not submit.params.ignore_eos):
            return
        is_last = token in EOS and eos_ends(submit, output)
        ended, consuming = advance_all([(constraint, token)])
        assert ended == ([0] if is_last else [])
        assert consume_tokens(consuming, toy) == {}
        if is_last:
            return
        output.append(token)


@pytest.mark.parametrize(
    ("allowed", "stop_token_ids", "expected"),
    [
        ((1, 2), (), {1, 2}),
        ((1, 2), (7,), {1, 2}),
        ((1, EOS[0]), (), {1, EOS[0]}),
        ((1, 7), (7,), {1, 7}),
        ((1, 2), (VOCAB + 40,), {1, 2}),
    ],
)
def test_the_end_of_an_answer_is_allowed_only_by_name(
    allowed: tuple[int, ...], stop_token_ids: tuple[int, ...], expected: set[int]
) -> None:
    """A client that allows the tokens of its labels gets one of them."""
    submit, vocabulary = message(allowed_token_ids=allowed, stop_token_ids=stop_token_ids), Vocabulary(VOCAB, EOS)
    masks = np.zeros((1, vocabulary.words), np.int32)
    assert fill_masks({0: Constraint(submit, vocabulary, None)}, masks, vocabulary, None) == {}
    assert tokens_of(masks[0]) == expected


@OVERLAP
@pytest.mark.parametrize("budget", [2, 100])
def test_constrained_rows_follow_their_constraints_and_change_no_other_row(overlap: bool, budget: int) -> None:
    harness = Harness(overlap=overlap, budget=budget, rows=12)
    prompt = list(range(20, 29))
    options: list[dict[str, Any]] = [
        {"grammar": GRAMMAR.text},
        {"grammar": GRAMMAR.text, "ignore_eos": True},
        {"grammar": GRAMMAR.text, "min_tokens": 12, "stop_token_ids": (30,)},
        {"grammar": GRAMMAR.text, "thinking": Thinking(start=(50,), end=(60, 61), is_open=True, budget=2)},
        {"thinking": Thinking(start=(50,), end=(60, 61), is_open=True, budget=3)},
        {"allowed_token_ids": (1, 2, 3)},
        {"bad_words": ((5,), (6, 7))},
    ]
    free = [harness.submit([*prompt, number], 12, seed=number, logprobs=1) for number in range(3)]
    constrained = [harness.submit([*prompt, 9], 12, seed=number, **each) for number, each in enumerate(options)]
    assert [answer.is_compiled for answer in constrained] == [False] * len(options)
    harness.run()
    for answer in (*free, *constrained):
        assert answer.failure is None and answer.tokens == answer.expected()
        assert answer.is_compiled == bool(answer.submit.constraint.grammar)
    assert [answer.finish for answer in constrained[:3]] == ["stop"] * 3
    assert constrained[3].tokens[2:4] == [60, 61]
    harness.check_idle()


@OVERLAP
def test_steps_without_constrained_rows_wait_for_no_masks(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    harness.submit([1, 2, 3], 8, min_tokens=3, top_p=0.5, thinking=MARKERS)
    harness.run()
    assert harness.engine.late_rows == 0
    answer = harness.submit([1, 2, 3], 8, allowed_token_ids=tuple(range(20, 90)))
    harness.run()
    assert harness.engine.late_rows == 8 == len(answer.tokens)


def test_an_overlapped_step_is_sampled_when_the_step_before_it_is_complete() -> None:
    harness = Harness(checks=False)
    harness.submit([1, 2, 3], 4, ignore_eos=True, allowed_token_ids=(1, 2))
    harness.run()
    assert harness.engine.log == [
        *[("launch", 0), ("sample", 0), ("launch", 1), ("collect", 0), ("sample", 1)],
        *[("launch", 2), ("collect", 1), ("sample", 2), ("launch", 3), ("collect", 2), ("sample", 3), ("collect", 3)],
    ]


@OVERLAP
def test_a_preempted_request_keeps_its_place_in_the_grammar(overlap: bool) -> None:
    grammar = ToyGrammar(factor=2, length=40, least=40)
    harness = Harness(pages=13, page_size=2, rows=4, max_model_len=26, budget=5, overlap=overlap)
    answers = [harness.submit([i, 2, 3, 4, 5, 6], 18, grammar=grammar.text) for i in range(6)]
    harness.run()
    assert harness.scheduler.counters.preemptions > 0
    for answer in answers:
        assert answer.tokens == answer.expected() and len(answer.tokens) == 18
    harness.check_idle()


@OVERLAP
def test_an_answer_continues_behind_an_earlier_output(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    thinking = Thinking(start=(50,), end=(60, 61), is_open=True, budget=4)
    all_options: list[dict[str, Any]] = [{"grammar": GRAMMAR.text}, {"thinking": thinking}]
    for options in all_options:
        whole = harness.submit([1, 2, 3], 12, seed=5, **options)
        harness.run()
        output = np.array(whole.tokens[:3], np.int32).tobytes()
        rest = harness.submit([1, 2, 3], 12, seed=5, output=output, **options)
        seen: list[int] = []
        while harness.scheduler.has_work:
            step = harness.loop.step()
            if step is not None:
                seen += step.tokens.tolist()
        assert [*whole.tokens[:3], *seen] == whole.tokens == whole.expected()
        del harness.answers[rest.submit.id]
    harness.check_idle()


@OVERLAP
def test_a_request_is_admitted_only_when_its_grammar_is_compiled(overlap: bool) -> None:
    harness = Harness(overlap=overlap, max_waiting=3)
    running = harness.submit([1, 2, 3], 20, ignore_eos=True)
    harness.step()
    waiting = [harness.submit([4, 5, number], 6, grammar=GRAMMAR.text) for number in range(3)]
    for _ in range(5):
        harness.step()
    assert len(running.tokens) >= 4 and not any(answer.tokens for answer in waiting)
    assert harness.scheduler.num_waiting == harness.scheduler.num_held == 3
    with pytest.raises(RequestError) as refused:
        harness.submit([1], 2)
    assert refused.value.code == "queue_full"
    with pytest.raises(RequestError) as refused:
        harness.scheduler.submit(waiting[0].submit)
    assert refused.value.code == "duplicate_request"
    harness.grammars.compile(1)
    harness.step()
    assert [answer.is_compiled for answer in waiting].count(True) == 1
    assert harness.scheduler.num_held == 2
    harness.run()
    assert all(answer.tokens == answer.expected() for answer in (running, *waiting))
    harness.check_idle()


@pytest.fixture
def short_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 8 tokens are computed while their grammars are compiled."""
    monkeypatch.setattr("minisgl.scheduler.constrained.AHEAD_TOKENS", 8)


PROMPT = list(range(20, 40))


@OVERLAP
@pytest.mark.usefixtures("short_is_long")
def test_a_long_prompt_is_computed_while_its_grammar_is_compiled(overlap: bool) -> None:
    harness = Harness(overlap=overlap, budget=16)
    running = harness.submit([1, 2, 3], 40, ignore_eos=True)
    harness.step()
    long = harness.submit(PROMPT, 6, grammar=GRAMMAR.text)
    short = harness.submit(PROMPT[:7], 6, grammar=GRAMMAR.text)
    scored = harness.submit(PROMPT[1:], 6, grammar=GRAMMAR.text, prompt_logprobs=0)
    harness.step()
    assert harness.scheduler.num_held == 3
    harness.scheduler.now += COMPILE_PATIENCE
    for _ in range(5):
        harness.step()
    assert harness.scheduler.num_held == 2
    assert harness.scheduler.counters.prefill_tokens == 3 + len(PROMPT) - 1
    waiting = (long, short, scored)
    assert not any(answer.is_compiled or answer.tokens or answer.prompt_scores for answer in waiting)
    assert len(running.tokens) > 5
    harness.run()
    assert all(answer.is_compiled for answer in waiting)
    assert all(answer.tokens == answer.expected() for answer in (running, *waiting))
    harness.check_idle()


@OVERLAP
@pytest.mark.usefixtures("short_is_long")
def test_a_known_grammar_costs_a_long_prompt_no_step(overlap: bool) -> None:
    harness = Harness(overlap=overlap, budget=16)
    long = harness.submit(PROMPT, 1, grammar=GRAMMAR.text)
    harness.grammars.compile(1)
    harness.scheduler.now += COMPILE_PATIENCE
    harness.run()
    assert harness.scheduler.counters.steps == 2
    assert long.tokens == long.expected()


@OVERLAP
@pytest.mark.usefixtures("short_is_long")
def test_a_grammar_that_does_not_compile_fails_a_request_whose_prompt_is_computed(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    running = harness.submit([1, 2, 3], 40, ignore_eos=True)
    failing = [
        harness.submit([number, *PROMPT], 6, grammar=ToyGrammar(factor=1, length=1, least=0, valid=False).text)
        for number in range(2)
    ]
    harness.scheduler.now += COMPILE_PATIENCE
    for _ in range(5):
        harness.step()
    assert harness.scheduler.table.num_in_use == 3
    harness.run()
    for answer in failing:
        assert answer.failure is not None and answer.failure.code == "invalid_grammar"
        assert not answer.is_compiled and not answer.tokens
    assert running.tokens == running.expected()
    harness.check_idle()


@OVERLAP
@pytest.mark.usefixtures("short_is_long")
def test_requests_end_after_their_prompts_and_before_their_grammars(overlap: bool) -> None:
    harness = Harness(overlap=overlap, rows=2)
    running = harness.submit([1, 2, 3], 40, ignore_eos=True)
    in_row, queued, expired = (
        harness.submit([number, *PROMPT], 6, grammar=GRAMMAR.text, remaining_ms=seconds * 1000)
        for number, seconds in enumerate((0, 0, 1))
    )
    harness.scheduler.now += COMPILE_PATIENCE
    for _ in range(5):
        harness.step()
    assert harness.scheduler.table.num_in_use == 2 and harness.scheduler.num_waiting == 2
    assert harness.abort(in_row) and harness.abort(queued)
    harness.scheduler.now += 1
    assert [failure.id for failure in harness.scheduler.expire()] == [expired.submit.id]
    harness.run()
    assert not any(answer.tokens or answer.is_compiled for answer in (in_row, queued, expired))
    assert running.tokens == running.expected()
    harness.check_idle()


@OVERLAP
def test_a_grammar_that_does_not_compile_fails_only_its_request(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    wrong = ToyGrammar(factor=1, length=1, least=0, valid=False)
    alone = harness.submit([1, 2], 4, grammar=wrong.text)
    harness.run()
    assert alone.failure is not None and alone.failure.code == "invalid_grammar" and not alone.is_compiled
    beside = harness.submit([1, 2, 3], 6)
    failing = harness.submit([1, 2], 4, grammar=wrong.text)
    harness.grammars.compile(1)
    harness.run()
    assert failing.failure is not None and not failing.tokens
    assert beside.tokens == beside.expected()
    harness.check_idle()


@OVERLAP
def test_requests_end_while_their_grammars_are_compiled(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    aborted = harness.submit([1, 2], 4, grammar=GRAMMAR.text)
    expired = harness.submit([1, 3], 4, grammar=GRAMMAR.text, remaining_ms=1000)
    assert harness.abort(aborted) and not harness.abort(aborted)
    harness.scheduler.now = 2.0
    assert [failure.id for failure in harness.scheduler.expire()] == [expired.submit.id]
    assert not harness.scheduler.has_work
    harness.grammars.compile(2)
    other = harness.submit([1, 4], 4, grammar=GRAMMAR.text)
    harness.scheduler.drop_client(0)
    assert not harness.scheduler.has_work
    again = harness.submit([1, 4], 4)
    harness.run()
    assert not (aborted.tokens or expired.tokens or other.tokens)
    assert again.tokens == again.expected()
    harness.check_idle()


def test_grammars_of_requests_that_have_ended_are_not_compiled() -> None:
    harness = Harness()
    aborted = harness.submit([1, 2], 4, grammar=GRAMMAR.text)
    expired = harness.submit([1, 3], 4, grammar=GRAMMAR.text, remaining_ms=1000)
    assert harness.abort(aborted)
    harness.scheduler.now = 2.0
    harness.scheduler.expire()
    wanted = harness.submit([1, 2], 4, grammar=GRAMMAR.text)
    harness.run()
    assert len(harness.grammars.matchers) == 1
    assert not (aborted.tokens or expired.tokens) and wanted.tokens == wanted.expected()
    harness.check_idle()


@OVERLAP
def test_reasoning_before_a_grammar_does_not_end_the_answer(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    thinking = Thinking(start=(50,), end=(60,), is_open=True)
    tokens = (*EOS, 7, 8)
    answer = harness.submit([1, 2, 3], 30, grammar=GRAMMAR.text, thinking=thinking, allowed_token_ids=tokens)
    harness.run()
    assert answer.finish == "length" and not set(answer.tokens) & set(EOS)
    harness.check_idle()


def running_beside_others(overlap: bool, **options: Any) -> tuple[Harness, Answer, list[Answer]]:
    """A constrained request that has some tokens, and others that run beside it."""
    harness = Harness(overlap=overlap)
    others = [
        harness.submit([1, 2, 4], 10, ignore_eos=True, grammar=ToyGrammar(factor=2, length=30, least=30).text),
        harness.submit([1, 2, 5], 10, ignore_eos=True),
    ]
    answer = harness.submit([1, 2, 3], 10, **options)
    harness.grammars.compile(2)
    for _ in range(4):
        harness.step()
    assert 2 <= len(answer.tokens) < 10
    return harness, answer, others


def check_others(harness: Harness, others: list[Answer]) -> None:
    harness.run()
    for answer in others:
        assert answer.tokens == answer.expected() and len(answer.tokens) == 10
    harness.check_idle()


@OVERLAP
def test_a_refused_token_fails_only_its_request(overlap: bool) -> None:
    harness, answer, others = running_beside_others(overlap, grammar=ToyGrammar(factor=2, length=30, least=30).text)
    harness.grammars.matchers[0].refuses = True
    count = len(answer.tokens)
    harness.run()
    assert answer.failure is not None and answer.failure.code == "grammar_failed"
    assert answer.tokens == answer.expected()[: len(answer.tokens)] and len(answer.tokens) == count
    check_others(harness, others)


@OVERLAP
def test_a_mask_that_cannot_be_computed_fails_only_its_request(overlap: bool) -> None:
    harness, answer, others = running_beside_others(overlap, grammar=ToyGrammar(factor=2, length=30, least=30).text)
    harness.grammars.matchers[0].fails = True
    harness.run()
    assert answer.failure is not None and answer.failure.code == "grammar_failed"
    check_others(harness, others)


@OVERLAP
def test_a_contradiction_fails_only_its_request(overlap: bool) -> None:
    # Every text of two tokens goes on with the same one.
    bad = tuple((token, 1) for token in (1, 2)) + tuple((token, 2) for token in (1, 2))
    harness, answer, others = running_beside_others(
        overlap, allowed_token_ids=(1, 2, 3), bad_words=(*bad, (1, 3), (2, 3), (3, 3)), ignore_eos=True
    )
    harness.run()
    assert answer.failure is not None and answer.failure.code == "no_allowed_token"
    assert "relax" in answer.failure.message
    check_others(harness, others)


@OVERLAP
@pytest.mark.parametrize("when", [0, 1, 2, 3])
def test_constrained_requests_can_be_aborted_at_any_time(overlap: bool, when: int) -> None:
    harness, answer, others = running_beside_others(overlap, allowed_token_ids=(1, 2), ignore_eos=True)
    for _ in range(when):
        harness.step()
    count = len(answer.tokens)
    assert harness.abort(answer)
    check_others(harness, others)
    assert len(answer.tokens) == count


@OVERLAP
def test_rows_that_are_not_finite_end_without_their_grammar(overlap: bool) -> None:
    harness, answer, others = running_beside_others(overlap, allowed_token_ids=(1, 2), ignore_eos=True)
    slot = next(slot for slot, r in enumerate(harness.scheduler.table.requests) if r and r.id == answer.submit.id)
    harness.engine.fail_logits_of = {slot}
    harness.run()
    assert answer.failure is not None and answer.failure.code == "engine_error"
    check_others(harness, others)


def test_without_a_tokenizer_grammars_are_refused() -> None:
    harness = Harness()
    harness.scheduler.constrained._compiler = None
    with pytest.raises(RequestError) as refused:
        harness.submit([1, 2], 4, grammar=GRAMMAR.text)
    assert refused.value.code == "grammar_unavailable"
    allowed = harness.submit([1, 2], 4, allowed_token_ids=(1, 2))
    harness.run()
    assert allowed.tokens == allowed.expected()
    harness.check_idle()


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"allowed_token_ids": (VOCAB,)}, "invalid_token"),
        ({"allowed_token_ids": (-1,)}, "invalid_token"),
        ({"bad_words": ((),)}, "invalid_request"),
        ({"bad_words": ((1, VOCAB),)}, "invalid_token"),
        ({"bad_words": ((1,),) * 1025}, "invalid_request"),
        ({"bad_words": ((1,) * 1025,)}, "invalid_request"),
        ({"thinking": Thinking(start=(), end=(1,))}, "invalid_request"),
        ({"thinking": Thinking(start=(1,), end=())}, "invalid_request"),
        ({"thinking": Thinking(start=(VOCAB,), end=(1,))}, "invalid_token"),
        ({"thinking": Thinking(start=(1,), end=(-1,))}, "invalid_token"),
        ({"thinking": Thinking(start=(1,), end=(2,), budget=-2)}, "invalid_request"),
        ({"grammar": "x" * ((4 << 20) + 1)}, "invalid_request"),
    ],
)
def test_constraints_out_of_range_are_rejected(fields: dict[str, Any], code: str) -> None:
    harness = Harness()
    with pytest.raises(RequestError) as refused:
        harness.submit([1, 2], 8, **fields)
    assert refused.value.code == code
    harness.check_idle()


def test_a_matcher_that_refuses_a_token_is_an_error() -> None:
    matcher: Any = ToyMatcher(ToyGrammar(2, 9, 9), Vocabulary(VOCAB, EOS), VOCAB)
    constraint = Constraint(message(grammar="x"), Vocabulary(VOCAB, EOS), matcher)
    with pytest.raises(ConstraintError, match="token 3"):
        constraint.replay([4, 3])


@OVERLAP
def test_a_cached_prompt_that_waits_for_its_grammar_alone_joins_with_its_last_token(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets a row while there is nothing to compute, so no plan is made that could tell the engine."""
    monkeypatch.setattr("minisgl.scheduler.constrained.AHEAD_TOKENS", 1)
    harness = Harness(overlap=overlap, page_size=1)
    prompt = [1, 2, 3, 4, 5]
    first = harness.submit(prompt, 2, ignore_eos=True)
    harness.run()
    answer = harness.submit(prompt, 6, grammar=GRAMMAR.text)
    harness.scheduler.now += 1
    assert harness.scheduler.plan() is None and harness.scheduler.table.num_in_use == 1
    harness.grammars.compile(1)
    harness.run()
    assert first.tokens == first.expected() and answer.tokens == answer.expected()
    harness.check_idle()


class OfMask:
    """A constraint as far as `open_first` reads it."""

    def __init__(self, *, is_open: bool, is_alone: bool = True) -> None:
        self.is_open = is_open
        self.matcher = SimpleNamespace(is_alone=is_alone)


@pytest.mark.parametrize(
    ("rows", "is_open", "shared", "first"),
    [
        pytest.param(64, [], [], [], id="none is open"),
        pytest.param(64, [3, 40], [], [3, 40], id="some are open"),
        pytest.param(64, [3, 40], [3], [40], id="an instance is shared"),
        pytest.param(64, [*range(33)], [], [], id="most are open"),
        pytest.param(32, [5], [], [5], id="enough rows"),
        pytest.param(31, [5], [], [], id="few rows"),
    ],
)
def test_open_rows_go_first(rows: int, is_open: list[int], shared: list[int], first: list[int]) -> None:
    constraints: list[Any] = [OfMask(is_open=row in is_open, is_alone=row not in shared) for row in range(rows)]
    assert open_first(constraints) == first


def test_a_row_is_open_behind_a_mask_of_the_grammar_that_allows_much() -> None:
    vocabulary = Vocabulary(151_936, EOS)
    masks = np.stack([vocabulary.mask(range(0, 151_936, step)) for step in (1, 10, 40, 1, 1)])
    constraints: list[Any] = [SimpleNamespace(is_open=row == 2, follows_grammar=row != 3) for row in range(4)]
    note_open([*constraints, None], masks)
    assert [constraint.is_open for constraint in constraints] == [True, True, False, False]
