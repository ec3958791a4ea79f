"""Queue times of requests and sizes of steps."""

from __future__ import annotations

from minisgl.wire.messages import QUEUE_TIME_EDGES, STEP_TOKENS_EDGES
from support.scheduling import Harness


def test_each_request_is_counted_once_at_its_first_admission() -> None:
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


def test_the_first_token_of_a_request_reports_its_admission_time() -> None:
    harness = Harness(rows=1, overlap=False)
    first = harness.submit([20, 21], max_tokens=2, ignore_eos=True)
    second = harness.submit([30, 31], max_tokens=2, ignore_eos=True)
    started = {}
    while harness.scheduler.has_work:
        harness.scheduler.now += 1.0
        output = harness.step()
        if output is not None:
            started |= {output.ids[row].tobytes(): times for row, times in output.started.items()}
    assert started == {first.submit.id: (1.0, 1.0), second.submit.id: (3.0, 3.0)}


def test_the_first_token_behind_a_preemption_reports_the_number_of_preemptions() -> None:
    harness = Harness(pages=67, page_size=4, rows=8, max_model_len=64, budget=10_000)
    answers = [harness.submit([i] * 32, 3, ignore_eos=True) for i in range(8)]
    reported = {}
    while harness.scheduler.has_work:
        output = harness.step()
        if output is not None:
            reported |= {output.ids[row].tobytes(): count for row, count in output.preemptions.items()}
    assert harness.scheduler.counters.preemptions == 1
    assert list(reported.values()) == [1]
    assert set(reported) < {answer.submit.id for answer in answers}


def test_steps_are_counted_by_their_tokens() -> None:
    harness = Harness(rows=4, budget=16, overlap=False)
    harness.submit(list(range(20, 40)), max_tokens=3, ignore_eos=True)
    harness.run()
    counters = harness.scheduler.counters
    # 16 and 4 tokens of the prompt; the second step samples the first token, too, and the others decode one row each.
    sizes = {edge: count for edge, count in zip(STEP_TOKENS_EDGES, counters.step_sizes, strict=False) if count}
    assert sizes == {16.0: 1, 8.0: 1, 1.0: 2}
    assert (counters.step_tokens, sum(counters.step_sizes)) == (16 + 5 + 2, counters.steps)
