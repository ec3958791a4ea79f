"""Long-running servers: requests must leave nothing behind and cost other requests little."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minisgl.scheduler.radix_cache import RadixCache
from minisgl.scheduler.step_output import RequestError
from minisgl.wire.messages import Submit
from support.messages import submit_of
from support.numerics.kv_engine import reference
from support.scheduler_audit import check_radix
from support.scheduling import VOCAB, Harness


def submit(number: int, max_tokens: int = 3, **options: Any) -> Submit:
    prompt = np.array([number], "<i4").tobytes()
    return submit_of(id=number.to_bytes(16, "big"), prompt=prompt, max_tokens=max_tokens, seed=0, **options)


def test_ended_requests_are_dropped_before_their_deadline() -> None:
    harness = Harness()
    for number in range(1, 500):
        harness.submit([number % VOCAB], 1, remaining_ms=1 << 50)
        harness.run()
    assert len(harness.scheduler._deadlines._entries) <= 100
    harness.scheduler.now = 1e18
    assert harness.scheduler.expire() == []


def test_aborted_requests_leave_the_queue_behind_others() -> None:
    """A stream of requests of higher priority may keep the tail of the queue waiting."""
    harness = Harness(rows=1)
    running = harness.submit([1], 60, ignore_eos=True)
    waiting = harness.submit([2], 3, priority=1)
    harness.step()
    for number in range(500):
        harness.abort(harness.submit([number % VOCAB], 3))
    assert sum(len(tenant._heap) for tenant in harness.scheduler.queue._tenants.values()) <= 100
    harness.run()
    assert running.tokens == running.expected()
    assert waiting.tokens == waiting.expected()
    harness.check_idle()


@pytest.mark.parametrize("overlap", [True, False])
def test_only_as_many_requests_are_preempted_as_necessary(overlap: bool) -> None:
    """A preempted request also unlocks the cached pages of its prompt, so one preemption is enough here."""
    harness = Harness(pages=67, page_size=4, rows=8, max_model_len=64, budget=10_000, overlap=overlap)
    answers = [harness.submit([i] * 32, 3, ignore_eos=True) for i in range(8)]
    harness.run()
    assert harness.scheduler.counters.preemptions == 1
    assert all(answer.tokens == answer.expected() for answer in answers)
    harness.check_idle()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_prompt_with_bad_logits_leaves_the_cache(overlap: bool) -> None:
    """Its pages are cached when they are launched; they would fail every later request."""
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


def test_discard_removes_unlocked_pages_and_all_pages_behind_them() -> None:
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


def test_stop_ids_end_only_their_own_request() -> None:
    """Any number of ids outside of the vocabulary is harmless and leaves nothing behind."""
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


def test_a_temperature_beyond_float32_is_rejected_and_one_below_is_greedy() -> None:
    harness = Harness()
    with pytest.raises(RequestError, match="temperature"):
        harness.submit([1], 3, temperature=1e300)
    harness.submit([1], 3, temperature=1e-300, ignore_eos=True)
    plan = harness.scheduler.plan()
    assert plan is not None
    assert plan.new_rows[1].view(np.float32).tolist() == [0.0]
