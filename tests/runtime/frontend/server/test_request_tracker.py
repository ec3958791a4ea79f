"""Counts of requests at their end."""

from __future__ import annotations

from minisgl.frontend.config import RequestLimits
from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.request_record import RequestRecord
from minisgl.frontend.server.request_tracker import RequestTracker
from minisgl.wire.messages import SamplingParams
from minisgl.wire.text import Generate


def test_a_failed_stream_counts_as_an_error_although_its_handler_was_cancelled() -> None:
    tracker = RequestTracker(RequestLimits())
    record = RequestRecord(request_id="r", method="POST", path="/", started_at=0.0, status=200)
    stream = tracker.admit(record, [Generate(id=bytes(16), prompt="Hi", params=SamplingParams())], 1)
    stream.fail(ApiError(503, "shutting_down", "the server is shutting down"))
    # The handler was blocked in a send when it was cancelled, so it has not met the error.
    tracker.end(record, 1.0)
    assert record.error_code == "shutting_down"
    assert tracker.metrics.failed["shutting_down"] == 1
