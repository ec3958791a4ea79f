"""Ends what takes too long: clients that do not read, requests that wait, an engine that stands still."""

from __future__ import annotations

import asyncio
from typing import Final

from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.traffic import RequestRecord, Traffic

TICK_SECONDS: Final = 0.1


async def watch(traffic: Traffic) -> None:
    """Until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + TICK_SECONDS
        await asyncio.sleep(TICK_SECONDS)
        now = loop.time()
        traffic.metrics.loop_lag.observe(max(now - due, 0.0))
        check(traffic, now)


def check(traffic: Traffic, now: float) -> None:
    """Look at every request once."""
    limits = traffic.limits
    for record in list(traffic.in_flight):
        sending = now - record.sending_since if record.sending_since else 0.0
        if sending > limits.send_seconds or record.unsent > limits.unsent_bytes:
            _drop(traffic, record)
        elif record.exchange is not None and not record.exchange.ended and not record.error_code:
            _limit(traffic, record, now)


def _drop(traffic: Traffic, record: RequestRecord) -> None:
    if record.gone_in is None:
        traffic.metrics.slow_clients += 1
        record.gone_in = record.phase
        if record.drop is not None:
            # The handler sees a client that has left, and frees what the request holds.
            record.drop()


def _limit(traffic: Traffic, record: RequestRecord, now: float) -> None:
    limits = traffic.limits
    if now - record.began > limits.request_seconds:
        message = f"the answer was not complete within {limits.request_seconds:g} s"
        _fail(traffic, record, "total", ApiError(408, "deadline_exceeded", message))
    elif record.phase == "waiting" and now - record.accepted_at > limits.queue_seconds and _is_queued(traffic, record):
        message = f"the request found no place in the batch within {limits.queue_seconds:g} s: try again later"
        _fail(traffic, record, "queue", ApiError(503, "queue_timeout", message))
    elif _is_stalled(traffic, record, now):
        message = f"the engine has done nothing for the request for {limits.stall_seconds:g} s"
        _fail(traffic, record, "stall", ApiError(503, "engine_stalled", message))


def _fail(traffic: Traffic, record: RequestRecord, kind: str, error: ApiError) -> None:
    traffic.metrics.timeouts[kind] += 1
    record.fail(error)


def _is_queued(traffic: Traffic, record: RequestRecord) -> bool:
    """Whether it waits for a place, and is not being prefilled. Places are given in the order of arrival, so those who
    wait are the last to have come. Where priorities change the order, a request may be given more time than it should.
    """
    waiting = 0 if traffic.status is None else traffic.status.waiting
    later = sum(1 for one in traffic.in_flight if one.phase == "waiting" and one.accepted_at > record.accepted_at)
    return later < waiting


def _is_stalled(traffic: Traffic, record: RequestRecord, now: float) -> bool:
    limit = traffic.limits.stall_seconds
    if traffic.step_age(now) > limit and record.phase in ("waiting", "generating"):
        return True
    # Tokens without text are no news, so silence alone proves nothing while steps go on; but who was put back into the
    # queue is silent too.
    waiting = traffic.status is not None and traffic.status.waiting > 0
    return record.phase == "generating" and waiting and now - record.last_at > limit
