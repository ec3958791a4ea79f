"""Rank 0's side of tensor parallelism: every plan goes to the followers before rank 0 executes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import zmq

from minisgl.engine.errors import EngineError
from minisgl.engine.interface import Engine
from minisgl.wire.plan import StepPlan, StepResult
from minisgl.wire.sockets import open_socket, try_send

QUEUE_PLANS: Final = 16
"""Plans that may wait on each side of a follower's socket. Collectives keep ranks within a step or two of each other,
so a fuller queue means that the follower is stuck."""

STOP: Final = b""
"""The frame after which a follower ends cleanly."""

_STOP_LINGER_MS: Final = 2000


class PlanBroadcast:
    """One PUSH socket per follower: unlike PUB, it never drops a frame silently."""

    def __init__(self, context: zmq.Context[Any], addresses: Sequence[str]) -> None:
        """`addresses` of ranks 1, 2, …, on which `follower.PlanSource` listens."""
        self._sockets = []
        for address in addresses:
            socket = open_socket(context, zmq.PUSH, limit=QUEUE_PLANS)
            socket.connect(address)
            self._sockets.append(socket)

    def send(self, frame: bytes) -> None:
        """Raises EngineError when a follower's queue is full: without this plan it can only diverge."""
        for rank, socket in enumerate(self._sockets, 1):
            if not try_send(socket, [frame]):
                raise EngineError(
                    "follower_stuck",
                    f"rank {rank} does not take plans any more; see its log for the cause and start all ranks again",
                )

    def close(self) -> None:
        """Tell the followers to end, and give the message a moment to leave."""
        for socket in self._sockets:
            try_send(socket, [STOP])
            socket.close(linger=_STOP_LINGER_MS)
        self._sockets.clear()


class TensorParallelEngine:
    """Implements `interface.Engine` for a group of ranks; the scheduler need not know how many they are."""

    def __init__(self, engine: Engine, broadcast: PlanBroadcast) -> None:
        self._engine = engine
        self._broadcast = broadcast
        self.limits = engine.limits
        self.stats = engine.stats

    def launch(self, plan: StepPlan) -> Any:
        self._broadcast.send(plan.encode())
        return self._engine.launch(plan)

    def collect(self, handle: Any) -> StepResult:
        return self._engine.collect(handle)

    def close(self) -> None:
        self._broadcast.close()
        self._engine.close()
