"""Broadcast of plans from rank 0 to the worker ranks, before rank 0 executes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import zmq

from minisgl.engine.interface import Engine
from minisgl.errors import EngineError
from minisgl.wire.plan import IntArray, StepPlan, StepResult
from minisgl.wire.sockets import open_socket, try_send
from minisgl.wire.token_gate import show_token

QUEUE_PLANS: Final = 16
"""Plans that may wait on each side of a worker rank's socket. Collectives keep ranks within a step or two of each
other, so a fuller queue means that the worker rank is stuck."""

STOP: Final = b""
"""Frame after which a worker rank stops without an error."""

_STOP_LINGER_MS: Final = 2000


class PlanBroadcast:
    """One socket per worker rank, which never drops a frame silently."""

    def __init__(self, context: zmq.Context[Any], addresses: Sequence[str], token: str = "") -> None:
        """`addresses` of ranks 1, 2, …, where a `PlanReceiver` listens: on TCP one with this
        `token`, if there is one."""
        self._sockets = []
        for address in addresses:
            socket = open_socket(context, zmq.PUSH, limit=QUEUE_PLANS)
            # A rank of the same pod asks for none, and libzmq would not connect.
            if token and address.startswith("tcp:"):
                show_token(socket, token)
            socket.connect(address)
            self._sockets.append(socket)

    def send(self, frame: bytes) -> None:
        """Send a plan to all worker ranks. Raises EngineError when a queue is full, since a rank that misses a plan
        diverges."""
        for rank, socket in enumerate(self._sockets, 1):
            if not try_send(socket, [frame]):
                raise EngineError(
                    "follower_stuck",
                    f"rank {rank} does not receive plans any more; see its log for the cause and restart all ranks",
                )

    def close(self) -> None:
        """Stop the worker ranks, and allow the message some time to leave."""
        for socket in self._sockets:
            try_send(socket, [STOP])
            socket.close(linger=_STOP_LINGER_MS)
        self._sockets.clear()


class TensorParallelEngine:
    """Implements `interface.Engine` for a group of ranks."""

    def __init__(self, engine: Engine, broadcast: PlanBroadcast) -> None:
        self._engine = engine
        self._broadcast = broadcast
        self.limits = engine.limits
        self.stats = engine.stats

    def launch(self, plan: StepPlan) -> Any:
        self._broadcast.send(plan.encode())
        return self._engine.launch(plan)

    def use_idle_time(self) -> bool:
        # Only all ranks together could use it.
        return False

    def waits_for_masks(self, handle: Any) -> bool:
        return self._engine.waits_for_masks(handle)

    def mask_memory(self, rows: int) -> IntArray:
        return self._engine.mask_memory(rows)

    def sample(self, handle: Any, masks: IntArray) -> None:
        self._engine.sample(handle, masks)

    def collect(self, handle: Any) -> StepResult:
        return self._engine.collect(handle)

    def close(self) -> None:
        self._broadcast.close()
        self._engine.close()
