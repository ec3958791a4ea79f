"""Checks all requests ten times a second: ends those that take too long, because the client does not read, a time limit
has passed or the engine has stalled, and keeps silent streams open."""

from __future__ import annotations

import asyncio
from typing import Final

from minisgl.frontend.config import RequestLimits
from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.request_record import RequestRecord
from minisgl.frontend.server.request_tracker import RequestTracker
from minisgl.frontend.server.response_stream import ResponseStream

TICK_SECONDS: Final = 0.1


async def watch(requests: RequestTracker, ping_seconds: float) -> None:
    """Run until cancelled. Streams that are silent for `ping_seconds` get a keepalive comment."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + TICK_SECONDS
        await asyncio.sleep(TICK_SECONDS)
        now = loop.time()
        requests.metrics.loop_lag.observe(max(now - due, 0.0))
        check(requests, now)
        for record in requests.in_flight:
            if record.stream is not None:
                record.stream.interrupt_silence(now - ping_seconds)


def check(requests: RequestTracker, now: float) -> None:
    """Apply the limits to every request once."""
    limits = requests.limits
    for record in list(requests.in_flight):
        stream = record.stream
        unsent = 0 if stream is None else stream.unsent_characters
        if record.send_started_at and (
            now - record.send_started_at > limits.send_seconds or unsent > limits.unsent_bytes
        ):
            _drop_slow_client(requests, record)
        elif stream is not None and stream.is_open:
            _apply_limits(requests, stream, now)


def _drop_slow_client(requests: RequestTracker, record: RequestRecord) -> None:
    if record.disconnected_in is None:
        requests.metrics.slow_clients.value += 1
        record.disconnected_in = record.phase
        if record.client is not None:
            # The handler sees a disconnected client, and frees what the request holds.
            record.client.abort()


def _apply_limits(requests: RequestTracker, stream: ResponseStream, now: float) -> None:
    limits = requests.limits
    queued_for = now - stream.queued_since
    if now - stream.started_at > limits.request_seconds:
        message = f"the response was not complete within {limits.request_seconds:g} s"
        kind, error = "total", ApiError(408, "deadline_exceeded", message)
    elif stream.phase == "waiting" and queued_for > limits.queue_seconds and _is_queued(requests, stream):
        message = f"the request was queued for more than {limits.queue_seconds:g} s; retry later"
        kind, error = "queue", ApiError(503, "queue_timeout", message)
    elif _is_stalled(requests, stream, now):
        message = f"the engine made no progress on the request for {_stall_seconds(limits):g} s"
        kind, error = "stall", ApiError(503, "engine_stalled", message)
    else:
        return
    requests.metrics.timeouts[kind] += 1
    stream.fail(error)


def _is_queued(requests: RequestTracker, stream: ResponseStream) -> bool:
    """Whether the request waits for a place in the batch, and is not being prefilled. Places are given in the order of
    arrival, so the requests that wait are the latest ones. Where priorities change the order, a request may be given
    more time than it should."""
    waiting = 0 if requests.status is None else requests.status.waiting
    streams = [record.stream for record in requests.in_flight if record.stream is not None]
    later = sum(1 for other in streams if other.phase == "waiting" and other.accepted_at > stream.accepted_at)
    return later < waiting


def _stall_seconds(limits: RequestLimits) -> float:
    """Longest time without progress. A stalled engine is restarted, or the router finds another: if the answer goes on
    then, it is waited for."""
    return limits.stall_seconds + (limits.queue_seconds if limits.continues else 0)


def _is_stalled(requests: RequestTracker, stream: ResponseStream, now: float) -> bool:
    limit = _stall_seconds(requests.limits)
    if stream.phase != "generating":
        # A request without a token outlives a hung engine: the launcher restarts it, or the router finds another.
        return False
    if requests.step_age(now) > limit:
        return True
    # Tokens without text are not reported, so silence alone proves nothing while steps are made; but a preempted
    # request, back in the queue, is silent too.
    waiting = requests.status is not None and requests.status.waiting > 0
    return waiting and now - stream.last_progress_at > limit
