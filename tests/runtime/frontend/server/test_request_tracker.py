"""Counts of requests at their end, and the age of the engine's last step."""

from __future__ import annotations

import gc
import weakref

from minisgl.frontend.config import RequestLimits
from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.request_record import RequestRecord
from minisgl.frontend.server.request_tracker import RequestTracker
from minisgl.wire.messages import SamplingParams, Status
from minisgl.wire.status import ReplicaView
from minisgl.wire.text import Finished
from support.messages import generate_of, status_of


def test_a_failed_stream_counts_as_an_error_although_its_handler_was_cancelled() -> None:
    tracker = RequestTracker(RequestLimits())
    record = RequestRecord(request_id="r", method="POST", path="/", started_at=0.0, status=200)
    stream = tracker.admit(record, [generate_of(id=bytes(16), prompt="Hi", params=SamplingParams())], 1)
    stream.fail(ApiError(503, "shutting_down", "the server is shutting down"))
    # The handler was blocked in a send when it was cancelled, so it has not met the error.
    tracker.end(record, 1.0)
    assert record.error_code == "shutting_down"
    assert tracker.metrics.failed["shutting_down"] == 1


def test_the_first_step_after_an_idle_time_has_an_age() -> None:
    tracker = RequestTracker(RequestLimits())
    record = RequestRecord(request_id="r", method="POST", path="/", started_at=0.0)
    stream = tracker.admit(record, [generate_of(id=bytes(16), prompt="Hi", params=SamplingParams())], 1)
    tracker.update_engine(None, _idle(), 5.0)
    assert tracker.step_age(7.0) == 0.0, "the engine does not have the request yet"
    tracker.accept(stream.choices[0], 3, 7.0)
    assert tracker.step_age(9.0) == 4.0, "the last status is that of an idle engine"
    tracker.update_engine(None, None, 10.0)
    assert tracker.step_age(99.0) == 0.0, "the engine was lost"
    tracker.update_engine(None, _idle(), 100.0)
    stream.fail(ApiError(503, "shutting_down", "the server is shutting down"))
    tracker.end(record, 101.0)
    assert tracker.step_age(200.0) == 0.0


def test_each_start_of_a_replica_counts_once() -> None:
    tracker = RequestTracker(RequestLimits())

    def starts(*epochs: int) -> float:
        tracker.count_starts([_view(number, epoch) for number, epoch in enumerate(epochs)])
        return tracker.metrics.engine_starts.value

    assert starts(0, 0) == 0, "none is connected yet"
    assert starts(1, 2) == 2
    # The newest replica is gone, and comes back as it was.
    assert starts(1) == 2
    assert starts(1, 2) == 2
    assert starts(1, 3) == 3
    assert starts(4, 3) == 4


def _view(number: int, epoch: int) -> ReplicaView:
    known = {"revision": "a", "address": f"10.0.0.{number}", "routable": epoch > 0, "reason": ""}
    return ReplicaView(replica=f"chat-r{number}", epoch=(epoch, 0), running=0, waiting=0, **known)


def _idle() -> Status:
    """Status of an engine before its first step."""
    return status_of(num_pages=8)


def test_the_choices_of_a_request_that_has_ended_wait_for_no_collection_of_garbage() -> None:
    tracker = RequestTracker(RequestLimits())
    record = RequestRecord(request_id="r", method="POST", path="/", started_at=0.0)
    stream = tracker.admit(record, [generate_of(id=bytes(16), prompt="a")], 1)
    tracker.accept(stream.choices[0], 1, 1.0)
    end = Finished(id=bytes(16), reason="stop", prompt_tokens=1, cached_tokens=0, completion_tokens=1)
    tracker.finish(stream.choices[0], end, 2.0)
    tracker.release(stream)
    tracker.release(stream)
    tracker.end(record, 3.0)
    kept = weakref.ref(stream)
    gc.disable()
    try:
        del stream
        assert kept() is None
    finally:
        gc.enable()
