"""Against what wears a server down: requests that leave something behind, or that cost the others too much."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minisgl.scheduler.radix_cache import RadixCache
from minisgl.scheduler.step_output import RequestError
from minisgl.wire.messages import Submit
from support.numerics.kv_engine import reference
from support.scheduler_audit import check_radix
from support.scheduling import VOCAB, Harness


def submit(number: int, max_tokens: int = 3, **options: Any) -> Submit:
    prompt = np.array([number], "<i4").tobytes()
    return Submit(id=number.to_bytes(16, "big"), prompt=prompt, max_tokens=max_tokens, seed=0, **options)


def test_requests_that_ended_are_not_kept_until_their_deadline() -> None:
    harness = Harness()
    for number in range(1, 500):
        harness.submit([number % VOCAB], 1, deadline_ms=1 << 50)
        harness.run()
    assert len(harness.scheduler._deadlines) <= 100
    assert harness.scheduler.expire(1 << 51) == []


def test_requests_that_were_aborted_behind_others_leave_the_queue() -> None:
    """A stream of better requests may keep the queue's tail from ever coming up."""
    harness = Harness(rows=1)
    running = harness.submit([1], 60, ignore_eos=True)
    waiting = harness.submit([2], 3, priority=1)
    harness.step()
    for number in range(500):
        harness.abort(harness.submit([number % VOCAB], 3))
    assert len(harness.scheduler.queue._heap) <= 100
    harness.run()
    assert running.tokens == running.expected()
    assert waiting.tokens == waiting.expected()
    harness.check_idle()


@pytest.mark.parametrize("overlap", [True, False])
def test_no_more_requests_are_preempted_than_must_be(overlap: bool) -> None:
    """A victim gives back the prompt's pages too, although they are the cache's: one is enough here."""
    harness = Harness(pages=67, page_size=4, rows=8, max_model_len=64, budget=10_000, overlap=overlap)
    answers = [harness.submit([i] * 32, 3, ignore_eos=True) for i in range(8)]
    harness.run()
    assert harness.scheduler.counters.preemptions == 1
    assert all(answer.tokens == answer.expected() for answer in answers)
    harness.check_idle()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_prompt_that_gave_bad_logits_is_not_found_again(overlap: bool) -> None:
    """Its pages are in the cache since they were launched: there they would fail every later request."""
    harness = Harness(overlap=overlap, page_size=4)
    prompt = list(range(20, 33))
    bad = harness.submit(prompt, 1, ignore_eos=True)
    harness.engine.fail_logits_of.add(0)
    harness.run()
    assert bad.failure is not None
    again = harness.submit(prompt, 4, ignore_eos=True)
    harness.run()
    assert again.cached == 0
    assert again.tokens == again.expected()
    harness.check_idle()


def test_discard_takes_what_is_unlocked_and_all_behind_it() -> None:
    cache = RadixCache(1)

    def insert(*tokens: int) -> Any:
        first = sum(tokens) * 10
        return cache.insert(
            cache.root, np.array(tokens, np.int32), np.arange(first, first + len(tokens), dtype=np.int32)
        )[0]

    locked = insert(1, 2)
    cache.lock(locked)
    middle, _, other = insert(1, 2, 3), insert(1, 2, 3, 4), insert(9)
    assert len(cache.discard(locked)) == 0
    assert len(cache.discard(cache.root)) == 0
    assert len(cache.discard(middle)) == 2
    assert check_radix(cache) == {*locked.pages.tolist(), *other.pages.tolist()}
    cache.unlock(locked)
    assert cache.evict(9).tolist() == [*other.pages.tolist(), *locked.pages.tolist()]
    assert (cache.num_pages, cache.evictable_pages) == (0, 0)


def test_stop_ids_end_only_the_request_that_has_them() -> None:
    """Ids out of the vocabulary are harmless, however many; and nothing of them stays."""
    harness = Harness()
    before = harness.scheduler.table._may_end.copy()
    stop_id = reference([1, 2], 0, 2, VOCAB, set())[1]
    absurd = (stop_id, stop_id, -1, -5, VOCAB, *range(1 << 62, (1 << 62) + 100_000))
    stopping = harness.submit([1, 2], 20, ignore_eos=True, stop_token_ids=absurd)
    going_on = harness.submit([1, 2], 20, ignore_eos=True)
    harness.run()
    assert stopping.tokens == reference([1, 2], 0, 20, VOCAB, {stop_id})
    assert stopping.finish == "stop"
    assert going_on.tokens == reference([1, 2], 0, 20, VOCAB, set())
    assert (harness.scheduler.table._may_end == before).all()


def test_a_temperature_beyond_float32_is_refused_and_one_below_is_greedy() -> None:
    harness = Harness()
    with pytest.raises(RequestError, match="temperature"):
        harness.submit([1], 3, temperature=1e300)
    harness.submit([1], 3, temperature=1e-300, ignore_eos=True)
    plan = harness.scheduler.plan()
    assert plan is not None
    assert plan.new_rows[1].view(np.float32).tolist() == [0.0]
