"""Requests from submit to end: results for clients, and no remains in the scheduler."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from minisgl.scheduler.pages import Owner
from minisgl.scheduler.request import Phase
from minisgl.scheduler.step_output import RequestError
from support.constrained import ToyGrammar
from support.messages import submit_of
from support.numerics.kv_engine import reference
from support.scheduling import EOS, VOCAB, Harness

OVERLAP = pytest.mark.parametrize("overlap", [True, False])


def prompt_with_eos_at(count: int) -> list[int]:
    """A prompt whose undisturbed answer has EOS as its token number `count`."""
    for first in range(VOCAB):
        for second in range(VOCAB):
            answer = reference([first, second], 0, 32, VOCAB, set(EOS))
            if len(answer) == count and answer[-1] in EOS:
                return [first, second]
    raise AssertionError("no such prompt")


@OVERLAP
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_a_request_for_n_tokens_returns_n_tokens(count: int, overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    answer = harness.submit([1, 2, 3], count, ignore_eos=True)
    harness.run()
    assert answer.finish == "length"
    assert answer.tokens == answer.expected()
    assert len(answer.tokens) == count
    harness.check_idle()


@OVERLAP
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("eos", EOS)
def test_no_token_follows_eos(count: int, eos: int, overlap: bool) -> None:
    """Every EOS id of the model ends an answer, not only the tokenizer's."""
    harness = Harness(overlap=overlap)
    prompt = next(
        [a, b]
        for a in range(VOCAB)
        for b in range(VOCAB)
        if (found := reference([a, b], 0, 16, VOCAB, set(EOS)))[-1] == eos and len(found) == count
    )
    answer = harness.submit(prompt, 16)
    harness.run()
    assert answer.finish == "stop"
    assert len(answer.tokens) == count
    assert answer.tokens[-1] == eos
    harness.check_idle()


@OVERLAP
def test_ignore_eos_and_stop_token_ids(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    prompt = prompt_with_eos_at(3)
    ignoring = harness.submit(prompt, 10, ignore_eos=True)
    stop_id = reference(prompt, 0, 2, VOCAB, set())[1]
    stopping = harness.submit(prompt, 10, stop_token_ids=(stop_id,))
    harness.run()
    assert (ignoring.finish, len(ignoring.tokens)) == ("length", 10)
    assert ignoring.tokens == ignoring.expected()
    assert (stopping.finish, stopping.tokens) == ("stop", stopping.expected())
    assert len(stopping.tokens) == 2
    harness.check_idle()


@OVERLAP
@pytest.mark.parametrize("count", [2, 7, 64])
@pytest.mark.parametrize("budget", [4, 16, 10_000])
def test_requests_with_one_cold_prompt_never_free_each_others_pages(count: int, budget: int, overlap: bool) -> None:
    harness = Harness(pages=2000, rows=64, budget=budget, overlap=overlap)
    prompt = list(range(32))  # whole pages: each request computes the last one again, beside the cached copy
    answers = [harness.submit(prompt, 6, seed=seed, ignore_eos=True) for seed in range(count)]
    while harness.scheduler.has_work:
        harness.step()
        pool, table = harness.scheduler.pages.pool, harness.scheduler.table
        for slot in np.flatnonzero(table.phase != Phase.EMPTY):
            assert (pool.owner[table.pages(slot)] != Owner.FREE).all()
    assert all(answer.tokens == answer.expected() for answer in answers)
    harness.check_idle()


def test_a_prefix_is_computed_once_even_by_requests_of_the_same_step() -> None:
    harness = Harness(pages=500, rows=16, budget=1000, page_size=4)
    prefix = list(range(32))
    answers = [harness.submit([*prefix, 50 + i], 2, ignore_eos=True) for i in range(8)]
    harness.run()
    assert harness.engine.stats.prefill_tokens == 33 + 7
    assert [answer.cached for answer in answers] == [0] + [32] * 7
    assert all(answer.tokens == answer.expected() for answer in answers)


def test_prefill_computes_only_uncached_tokens() -> None:
    harness = Harness(pages=200, page_size=4, budget=5)
    for prompt in ([1] * 10, [1] * 10, [1] * 8 + [2] * 20, [1] * 8 + [2] * 20 + [3]):
        harness.submit(prompt, 3, ignore_eos=True)
        harness.run()
    counters = harness.scheduler.counters
    assert counters.cached_tokens > 0
    assert harness.engine.stats.prefill_tokens == counters.prefill_tokens
    assert counters.prefill_tokens == counters.prompt_tokens - counters.cached_tokens
    assert [answer.cached for answer in harness.answers.values()] == [0, 8, 8, 28]


def test_a_prompt_in_the_queue_is_not_counted_as_looked_up() -> None:
    harness = Harness(pages=200, page_size=4, rows=1)
    for _ in range(3):
        harness.submit([1] * 10, 3, ignore_eos=True)
    counters = harness.scheduler.counters
    assert (counters.prompt_tokens, counters.cached_tokens) == (0, 0)
    seen = []
    while harness.scheduler.num_waiting:
        harness.step()
        seen.append((counters.prompt_tokens, counters.cached_tokens))
    assert sorted(set(seen)) == [(10, 0), (20, 8), (30, 16)]
    harness.run()


def test_a_full_hit_recomputes_the_last_page() -> None:
    harness = Harness(page_size=4)
    for _ in range(2):
        answer = harness.submit([5] * 8, 2, ignore_eos=True)
        harness.run()
    assert answer.cached == 4
    assert answer.tokens == answer.expected()


def test_with_overlap_a_step_is_launched_before_the_previous_result_is_read() -> None:
    harness = Harness(overlap=True)
    harness.submit([1, 2], 4, ignore_eos=True)
    harness.run()
    log = harness.engine.log
    assert log.index(("launch", 1)) < log.index(("collect", 0))
    assert log.index(("launch", 2)) < log.index(("collect", 1))


def test_without_overlap_every_result_is_read_before_the_next_launch() -> None:
    harness = Harness(overlap=False)
    harness.submit([1, 2], 4, ignore_eos=True)
    harness.run()
    assert harness.engine.log == [(event, step) for step in range(4) for event in ("launch", "collect")]


def test_decode_continues_during_chunked_prefill() -> None:
    harness = Harness(pages=200, budget=8, page_size=4)
    running = harness.submit([1, 2], 20, ignore_eos=True)
    harness.step()
    long = harness.submit(list(range(50)), 4, ignore_eos=True)
    harness.run()
    assert harness.engine.stats.mixed_steps >= 7
    assert harness.scheduler.counters.mixed_steps == harness.engine.stats.mixed_steps
    assert running.tokens == running.expected()
    assert long.tokens == long.expected()


@OVERLAP
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_preempted_requests_resume_where_they_stopped(page_size: int, overlap: bool) -> None:
    harness = Harness(pages=96 // page_size, page_size=page_size, rows=8, max_model_len=64, overlap=overlap)
    answers = [harness.submit([i, i + 1, i + 2], 50, ignore_eos=True, seed=i) for i in range(8)]
    harness.run()
    assert harness.scheduler.counters.preemptions > 0
    assert all(answer.tokens == answer.expected() for answer in answers)
    harness.check_idle()


def test_the_request_of_highest_priority_is_never_preempted() -> None:
    harness = Harness(pages=16, page_size=4, rows=4, max_model_len=64)
    worst = [harness.submit([i], 40, ignore_eos=True) for i in range(3)]
    best = harness.submit([9], 40, ignore_eos=True, priority=1)
    order = []
    while harness.scheduler.has_work:
        harness.step()
        order += [a for a in (*worst, best) if a.finish and a not in order]
    assert harness.scheduler.counters.preemptions > 0
    assert order[0] is best


def test_priority_takes_precedence_over_arrival() -> None:
    harness = Harness(rows=1)
    first = harness.submit([1], 3, ignore_eos=True)
    low = harness.submit([2], 3, ignore_eos=True)
    high = harness.submit([3], 3, ignore_eos=True, priority=5)
    order = []
    while harness.scheduler.has_work:
        harness.step()
        order += [a for a in (first, low, high) if a.finish and a not in order]
    assert order == [high, first, low]


@OVERLAP
@pytest.mark.parametrize("steps", range(8))
def test_abort_in_every_phase_leaves_nothing(steps: int, overlap: bool) -> None:
    harness = Harness(budget=5, overlap=overlap)
    other = harness.submit([1, 2, 3], 20, ignore_eos=True)
    victim = harness.submit(list(range(20, 34)), 3, ignore_eos=True)
    for _ in range(steps):
        harness.step()
    known = victim.finish is None
    assert harness.abort(victim) is known
    assert harness.abort(victim) is False, "an abort that comes twice is harmless"
    harness.run()
    assert other.tokens == other.expected()
    harness.check_idle()


def test_abort_that_races_an_eos() -> None:
    """The EOS is known while the next step is in flight; then the client aborts."""
    harness = Harness(overlap=True)
    answer = harness.submit(prompt_with_eos_at(2), 16)
    while answer.finish is None:
        harness.step()
    assert harness.scheduler.table.unsettled, "the row is still in flight"
    assert harness.abort(answer) is False
    harness.run()
    harness.check_idle()


def test_an_ended_row_is_not_reused_while_it_is_in_flight() -> None:
    """The only row must not go to the next prompt before the extra step is collected."""
    harness = Harness(rows=1, overlap=True, page_size=1)
    first = harness.submit(prompt_with_eos_at(2), 16)
    second = harness.submit([101 % VOCAB, 102 % VOCAB, 3, 4, 5, 6], 4, ignore_eos=True)
    while harness.scheduler.has_work:
        harness.step()
        # Check after each step: a wrong page may corrupt the state later, which would hide the cause.
        got = second.tokens
        assert got == second.expected()[: len(got)], "the next request got tokens that are not its own"
    assert first.tokens == first.expected()
    assert second.tokens == second.expected()
    harness.check_idle()


def test_a_deadline_keeps_nothing_of_an_answer_that_has_ended() -> None:
    harness, grammar = Harness(), ToyGrammar(factor=3, length=6, least=6).text
    harness.grammars.known = {grammar}
    answer = harness.submit([1, 2], 8, remaining_ms=1_000_000, grammar=grammar)
    matcher = weakref.ref(harness.grammars.matchers.pop())
    harness.run()
    harness.submit([1, 2], 4)
    harness.run()
    gc.collect()
    assert answer.tokens and matcher() is None
    again = harness.submit([1, 2], 4)
    harness.scheduler._unfinished[answer.submit.id] = harness.scheduler._unfinished.pop(again.submit.id)
    harness.scheduler.now = 2000.0
    assert not harness.scheduler.expire(), "the deadline is not that of another request with the same id"


def test_a_deadline_ends_queued_and_running_requests() -> None:
    harness = Harness(rows=1)
    running = harness.submit([1], 60, ignore_eos=True, remaining_ms=1000)
    queued = harness.submit([2], 60, ignore_eos=True, remaining_ms=2000)
    patient = harness.submit([3], 3, ignore_eos=True, remaining_ms=10_000)
    harness.step()
    harness.scheduler.now = 0.999
    assert harness.scheduler.expire() == []
    harness.scheduler.now = 2.0
    failures = harness.scheduler.expire()
    assert [failure.id for failure in failures] == [running.submit.id, queued.submit.id]
    assert {failure.code for failure in failures} == {"deadline_exceeded"}
    harness.run()
    assert patient.tokens == patient.expected()
    harness.scheduler.now = 20.0
    assert harness.scheduler.expire() == []
    harness.check_idle()


@OVERLAP
def test_logits_that_are_not_finite_end_one_request_with_an_error(overlap: bool) -> None:
    harness = Harness(overlap=overlap, page_size=1)
    good = harness.submit([1, 2], 10, ignore_eos=True)
    bad = harness.submit([3, 4], 10, ignore_eos=True)
    harness.step()
    harness.step()
    slot = harness.scheduler._unfinished[bad.submit.id].slot
    assert slot is not None
    harness.engine.fail_logits_of.add(slot)
    harness.run()
    assert bad.failure is not None
    assert bad.failure.code == "engine_error"
    assert bad.finish is None
    assert good.tokens == good.expected()
    harness.check_idle()


def test_a_request_continues_behind_its_earlier_output() -> None:
    harness = Harness()
    whole = harness.submit([1, 2, 3], 10, seed=5, ignore_eos=True)
    harness.run()
    output = np.array(whole.tokens[:4], np.int32).tobytes()
    request_id = (99).to_bytes(16, "big")
    harness.scheduler.submit(
        submit_of(id=request_id, prompt=whole.submit.prompt, output=output, max_tokens=10, seed=5, ignore_eos=True)
    )
    rest: list[tuple[int, int]] = []
    while harness.scheduler.has_work:
        step = harness.loop.step()
        if step is not None:
            rest += zip(step.index.tolist(), step.tokens.tolist(), strict=True)
    assert rest == list(enumerate(whole.tokens))[4:]


def test_a_continued_request_goes_ahead_of_new_ones_even_into_a_full_queue() -> None:
    harness = Harness(rows=1, max_waiting=1)
    harness.submit([1], 30, ignore_eos=True)
    harness.step()
    new = harness.submit([2], 30, ignore_eos=True)
    continued = submit_of(
        id=(99).to_bytes(16, "big"),
        prompt=new.submit.prompt,
        output=b"\6\0\0\0",
        max_tokens=10,
        seed=5,
        ignore_eos=True,
    )
    harness.scheduler.submit(continued)
    first = harness.scheduler.queue.peek()
    assert first is not None and first.id == continued.id
    assert harness.scheduler.num_waiting == 2


def test_a_request_has_the_first_tokens_of_its_prediction() -> None:
    harness = Harness()
    for given in ([], [3, 4, 5], [7] * 20_000):
        answer = harness.submit([1], 3, ignore_eos=True, prediction=np.array(given, np.int32).tobytes())
        queued = harness.scheduler.queue.peek()
        assert queued is not None and queued.prediction.tolist() == given[:16_384]
        harness.run()
        assert answer.tokens == answer.expected()
    harness.check_idle()


def test_dropping_a_client_aborts_its_requests() -> None:
    harness = Harness(rows=1)
    mine = [harness.submit([i], 30, ignore_eos=True) for i in range(3)]
    harness.step()
    harness.scheduler.drop_client(0)
    harness.run()
    assert not any(answer.finish for answer in mine)
    harness.check_idle()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"prompt": b""}, "invalid_request"),
        ({"prompt": b"abc"}, "invalid_request"),
        ({"prompt": np.array([VOCAB], np.int32).tobytes()}, "invalid_token"),
        ({"prompt": np.array([-1], np.int32).tobytes()}, "invalid_token"),
        ({"max_tokens": 0}, "invalid_request"),
        ({"max_tokens": -1}, "invalid_request"),
        ({"max_tokens": 64}, "context_length_exceeded"),
        ({"temperature": float("nan")}, "invalid_request"),
        ({"temperature": -1.0}, "invalid_request"),
        ({"temperature": float("inf")}, "invalid_request"),
        ({"top_p": 0.0}, "invalid_request"),
        ({"min_p": float("nan")}, "invalid_request"),
        ({"seed": 1 << 63}, "invalid_request"),
        ({"id": b"short"}, "invalid_request"),
        ({"prediction": b"abc"}, "invalid_request"),
        ({"prediction": np.array([1, VOCAB], np.int32).tobytes()}, "invalid_token"),
        ({"prediction": np.array([1, -1], np.int32).tobytes()}, "invalid_token"),
    ],
)
def test_an_invalid_request_is_rejected_and_others_continue(options: dict[str, object], code: str) -> None:
    harness = Harness()
    good = harness.submit([1], 3, ignore_eos=True)
    values = {"id": bytes(16), "prompt": np.array([1], np.int32).tobytes(), "max_tokens": 4, "seed": 0} | options
    with pytest.raises(RequestError) as error:
        harness.scheduler.submit(submit_of(**values))  # type: ignore[arg-type]
    assert error.value.code == code
    harness.run()
    assert good.tokens == good.expected()
    harness.check_idle()


def test_an_id_in_use_and_a_full_queue_are_rejected() -> None:
    harness = Harness()
    answer = harness.submit([1], 3)
    with pytest.raises(RequestError, match="this id"):
        harness.scheduler.submit(answer.submit)
    full = Harness(max_waiting=1)
    full.submit([1], 3)
    with pytest.raises(RequestError) as error:
        full.submit([2], 3)
    assert error.value.code == "queue_full"


def test_a_pool_smaller_than_one_request_is_rejected_at_start() -> None:
    with pytest.raises(ValueError, match="max_model_len"):
        Harness(pages=4, page_size=4, max_model_len=64)


@pytest.mark.parametrize("cache", ["radix", "naive"])
@pytest.mark.parametrize(("page_size", "pages"), [(1, 1100), (3, 366), (16, 68), (64, 17), (256, 5)])
def test_page_sizes_give_equal_answers_under_pressure(page_size: int, pages: int, cache: str) -> None:
    """Admission counts pages, not tokens."""
    harness = Harness(pages=pages, page_size=page_size, rows=8, max_model_len=600, cache=cache, budget=200)
    answers = [harness.submit([i % 3] * (40 + i * 9), 300, seed=i, ignore_eos=True) for i in range(10)]
    harness.run()
    assert all(answer.tokens == answer.expected() for answer in answers)
    assert harness.scheduler.counters.preemptions > 0, "the pool was ample"
    harness.check_idle()
