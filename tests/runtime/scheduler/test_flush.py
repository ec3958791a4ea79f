"""Flushing the prefix cache, at rest and under running requests."""

from __future__ import annotations

import pytest

from support.scheduling import Harness

PROMPT = list(range(20, 40))


def test_flush_removes_unlocked_prefixes() -> None:
    harness = Harness()
    harness.submit(PROMPT)
    harness.run()
    cached = harness.scheduler.pages.cache.evictable_pages
    assert cached > 0
    assert harness.scheduler.flush_cache() == cached
    assert harness.scheduler.pages.pool.free == harness.config.num_pages
    assert harness.scheduler.flush_cache() == 0
    again = harness.submit(PROMPT)
    harness.run()
    assert again.cached == 0
    harness.check_idle()


@pytest.mark.parametrize("steps", range(1, 8))
def test_flush_keeps_prefixes_of_running_requests(steps: int) -> None:
    harness = Harness()
    first = harness.submit(PROMPT, max_tokens=8, ignore_eos=True)
    harness.run()
    second = harness.submit(PROMPT, max_tokens=8, ignore_eos=True)
    third = harness.submit(PROMPT[:10], max_tokens=20, ignore_eos=True)
    for _ in range(steps):
        harness.step()
    harness.scheduler.flush_cache()
    harness.run()
    for answer in (first, second, third):
        assert answer.tokens == answer.expected()
    harness.check_idle()


def test_without_a_cache_there_is_nothing_to_flush() -> None:
    harness = Harness(cache="naive")
    harness.submit(PROMPT)
    harness.run()
    assert harness.scheduler.flush_cache() == 0
