"""Main loop of rank 0's process: messages of clients, then the next step."""

from __future__ import annotations

import gc
import logging
import threading
import time
from typing import Final

from minisgl.scheduler.clients import MAX_MESSAGES_PER_POLL, SHARED_MESSAGES_PER_POLL, Clients
from minisgl.scheduler.loop import StepLoop
from minisgl.scheduler.step_output import RequestError
from minisgl.wire.messages import Abort, Ack, EndDrain, Failed, Flush, Flushed, Pool, Status, Submit, ToScheduler

logger = logging.getLogger(__name__)

STATUS_SECONDS: Final = 0.1
"""Interval at which every client receives `Status`."""
IDLE_WAIT_MS: Final = 100
"""Longest wait for a message while there is no work."""

DRAIN_NOTICE_SECONDS: Final = 0.5
"""Shortest life of a draining scheduler: requests that are in transit are refused instead of lost."""
_DRAINING: Final = "replica is shutting down; retry"


def serve(loop: StepLoop, clients: Clients, stop: threading.Event, draining: threading.Event | None = None) -> None:
    """Serve clients until `stop` is set, or, once `draining` is set, until all requests have ended or a client has sent
    `EndDrain`.

    Exceptions of the engine are raised.
    """
    scheduler = loop.scheduler
    end_not_before: float | None = None
    # The loop makes no reference cycles, so collections would only pause it: they run while there is no work.
    gc.collect()
    gc.freeze()
    gc.disable()
    next_status = 0.0
    idle_turns = 0
    may_use_idle_time = True
    while not stop.is_set():
        if draining is not None and draining.is_set():
            if end_not_before is None:
                # Report the draining state immediately, so that no client sends more requests.
                end_not_before, next_status = time.monotonic() + DRAIN_NOTICE_SECONDS, 0.0
            elif not scheduler.has_work and time.monotonic() >= end_not_before:
                clients.flush()
                return
        # After the collection, which comes after a whole wait without messages.
        uses_idle_time = may_use_idle_time and idle_turns >= 2
        wait_ms = loop.spare_ms() if scheduler.has_work else 0 if uses_idle_time else IDLE_WAIT_MS
        most = SHARED_MESSAGES_PER_POLL if scheduler.expects_others else MAX_MESSAGES_PER_POLL
        for number, message in clients.receive(wait_ms, most):
            # Before the message: a client that has restarted may use the same request ids again.
            _drop_disconnected_clients(loop, clients)
            _handle_message(loop, clients, number, message, is_draining=end_not_before is not None)
        _drop_disconnected_clients(loop, clients)
        if scheduler.has_work:
            idle_turns = 0
            # Otherwise a message has arrived, and there is time for more.
            if not loop.spare_ms():
                scheduler.now = time.monotonic()
                output = loop.step()
                if output is not None:
                    clients.send_step(output, time.monotonic())
        else:
            idle_turns += 1
            if idle_turns == 2:
                # Only after a whole wait without messages, so that it does not delay a client's next request. Live
                # objects are frozen: with a large cache, scanning them again takes a tenth of a second.
                gc.collect()
                gc.freeze()
            elif uses_idle_time:
                may_use_idle_time = loop.engine.use_idle_time()
        now = time.monotonic()
        if now >= next_status:
            next_status = now + STATUS_SECONDS
            clients.flush()
            scheduler.now = now
            for failure in scheduler.expire():
                clients.send(failure.client, Failed(failure.id, failure.code, failure.message))
            clients.broadcast(status(loop, is_draining=end_not_before is not None))


def status(loop: StepLoop, *, is_draining: bool = False) -> Status:
    """The state of the scheduler, with its counters since start."""
    scheduler = loop.scheduler
    return Status(
        waiting=scheduler.num_waiting,
        deferred=scheduler.num_held,
        running=scheduler.table.num_in_use,
        used_pages=scheduler.pages.used,
        num_pages=scheduler.config.num_pages,
        page_size=scheduler.config.page_size,
        counters=scheduler.counters,
        start_seconds=loop.engine.stats.start_seconds,
        attention=loop.engine.stats.attention,
        data_types=() if (types := loop.engine.stats.data_types) is None else (types,),
        compiled_after_ready=loop.engine.stats.compiled_after_ready,
        draining=is_draining,
        state_checkpoints=scheduler.config.state_checkpoints or 0,
        used_state_checkpoints=scheduler.pages.used_state_checkpoints,
    )


def _drop_disconnected_clients(loop: StepLoop, clients: Clients) -> None:
    for number in clients.take_disconnected():
        loop.scheduler.drop_client(number)


def _handle_message(loop: StepLoop, clients: Clients, number: int, message: ToScheduler, *, is_draining: bool) -> None:
    match message:
        case Submit() | Pool() if is_draining:
            clients.send(number, Failed(message.id, "draining", _DRAINING))
        case Submit() | Pool():
            loop.scheduler.now = time.monotonic()
            try:
                is_queued = loop.scheduler.submit(message, number)
            except RequestError as error:
                clients.send(number, Failed(message.id, error.code, error.message))
            else:
                if is_queued:
                    clients.send(number, Ack(message.id))
        case Abort():
            loop.scheduler.abort(message.id)
        case Flush():
            clients.send(number, Flushed(message.id, loop.scheduler.flush_cache()))
        case EndDrain() if is_draining:
            # Nobody is told: their clients submit them elsewhere when they see the end of this process, which follows
            # once the step that runs is complete.
            logger.info("the drain ends early; %d requests go on elsewhere", loop.scheduler.abort_all())
