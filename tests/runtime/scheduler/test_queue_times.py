"""How long requests waited for a place in the batch."""

from __future__ import annotations

from minisgl.wire.messages import QUEUE_TIME_EDGES
from support.scheduling import Harness


def test_each_request_is_counted_once_when_it_gets_a_row() -> None:
    harness = Harness(rows=1)
    harness.scheduler.now = 10.0
    harness.submit([20, 21], max_tokens=2, ignore_eos=True)
    second = harness.submit([30, 31], max_tokens=2, ignore_eos=True)
    gone = harness.submit([40, 41], max_tokens=2, ignore_eos=True)
    harness.step()
    harness.scheduler.now = 11.2
    harness.abort(gone)
    harness.run()
    assert second.finish == "length"
    counters = harness.scheduler.counters
    assert sum(counters.queue_times) == 2
    assert counters.queue_times[0] == 1
    assert counters.queue_times[QUEUE_TIME_EDGES.index(1.5)] == 1
    assert abs(counters.queue_seconds - 1.2) < 1e-9
