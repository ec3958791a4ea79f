"""Worker ranks (ranks above 0): execute the plans of rank 0 in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import zmq

from minisgl.engine.broadcast import QUEUE_PLANS, STOP
from minisgl.engine.interface import Engine
from minisgl.errors import EngineError
from minisgl.wire.plan import StepPlan
from minisgl.wire.receive_limit import ReceiveLimit
from minisgl.wire.sockets import open_socket
from minisgl.wire.token_gate import TokenGate

_POLL_MS: Final = 100
"""Interval at which an idle worker rank checks whether it must stop."""

_IN_FLIGHT: Final = 2

_NO_PLAN: Final = b"\0"
"""Stands for a message of several frames, which no plan is."""


class PlanReceiver:
    """Socket on which one worker rank receives plans."""

    def __init__(self, context: zmq.Context[Any], address: str, token: str = "") -> None:
        """`token`: that of rank 0's `PlanBroadcast`; others cannot connect. There is one such receiver in a context.
        Empty: only rank 0 can reach the address."""
        self._socket = open_socket(context, zmq.PULL, limit=QUEUE_PLANS)
        self._gate = TokenGate(self._socket, token) if token else None
        self._limit = ReceiveLimit(self._socket) if address.startswith("tcp:") else None
        self._socket.bind(address)
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self, timeout_ms: int) -> bytes | None:
        """The next frame; None when none arrives within `timeout_ms`."""
        if not self._socket.poll(timeout_ms):
            return None
        frames = self._socket.recv_multipart(copy=False)
        if self._limit is not None:
            self._limit.delivered(frames)
            self._limit.greeted(frames)
        return frames[0].bytes if len(frames) == 1 else _NO_PLAN

    def close(self) -> None:
        if self._limit is not None:
            self._limit.close()
            self._limit = None
        self._socket.close()
        if self._gate is not None:
            self._gate.close()


def run_plans(engine: Engine, source: PlanReceiver, *, stop: threading.Event) -> None:
    """Execute plans until rank 0 sends STOP, or `stop` is set.

    Raises EngineError when a plan is missing or out of order, and all errors of the engine. The process must then exit
    with an error, since the ranks may have diverged.
    """
    pending: deque[Any] = deque()
    last: tuple[int, int] | None = None
    while not stop.is_set():
        # Wait for results only when there is no plan to launch, so that the device never idles.
        frame = source.receive(0 if pending else _POLL_MS)
        if frame is None:
            if pending:
                engine.collect(pending.popleft())
            continue
        if frame == STOP:
            break
        plan = StepPlan.decode(frame)
        _check_order(plan, last)
        last = plan.epoch, plan.step
        while len(pending) >= _IN_FLIGHT:
            engine.collect(pending.popleft())
        pending.append(engine.launch(plan))
    while pending:
        engine.collect(pending.popleft())


def _check_order(plan: StepPlan, last: tuple[int, int] | None) -> None:
    expected = (plan.epoch, 0) if last is None else (last[0], last[1] + 1)
    if (plan.epoch, plan.step) != expected:
        raise EngineError(
            "plan_gap",
            f"expected plan {expected[1]} of epoch {expected[0]} but got plan {plan.step} of epoch {plan.epoch}: "
            "plans were lost between rank 0 and this rank; restart all ranks",
        )


def run(
    address: str,
    create_engine: Callable[[], Engine],
    *,
    ready: Callable[[str], None],
    stop: threading.Event,
    token: str = "",
) -> None:
    """Entry point of a worker rank's process. `ready` is called with the bound address before the engine starts,
    because rank 0 sends its first plan as soon as its own engine is ready. `token`: as in PlanReceiver. Raises as
    `run_plans`."""
    context: zmq.Context[Any] = zmq.Context()
    source = PlanReceiver(context, address, token)
    try:
        ready(source.address)
        engine = create_engine()
        try:
            run_plans(engine, source, stop=stop)
        finally:
            engine.close()
    finally:
        source.close()
        context.term()
