"""Picks the endpoints of requests, which wait until their model has one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.request_record import RequestRecord
from minisgl.gateway.endpoint_picker.picks import Picks
from minisgl.gateway.handler import Gateway
from minisgl.gateway.models import Model


class Picker:
    """What all streams share. All methods belong to the event loop."""

    def __init__(
        self, gateway: Gateway, picks: Picks, find: Callable[[Model], Sequence[str]], serves: Callable[[Model], bool]
    ) -> None:
        """`find` returns the ready endpoints of a model. `serves` tells whether requests for a model may come here."""
        self.gateway = gateway
        self.serves = serves
        self.picks = picks
        self._find = find
        self._changed = asyncio.Event()

    def endpoints_changed(self) -> None:
        """Let the requests that wait for an endpoint look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def has_endpoints(self, model: Model) -> bool:
        return bool(self._find(model))

    def endpoints(self, model: Model, hint: frozenset[str] | None) -> list[str]:
        """Return the endpoints of a request in order. `hint`: those that may be picked; None: all. Raises ApiError."""
        found = self._find(model)
        if not found:
            raise ApiError.from_code("engine_unavailable", f"model {str(model.key)!r} has no ready endpoint; retry")
        permitted = [each for each in found if hint is None or each in hint]
        if not permitted:
            message = f"no ready endpoint of model {str(model.key)!r} is in the subset of the Gateway; retry"
            raise ApiError.from_code("engine_unavailable", message)
        return self.picks.order(permitted)

    async def hold(self, model: Model, record: RequestRecord, size: int) -> Model:
        """Hold a request, whose body has `size` bytes, until its model has an endpoint. Returns the table's entry of
        the model then. Raises ApiError."""
        clock = asyncio.get_running_loop().time
        until = record.started_at + self.gateway.requests.limits.queue_seconds
        record.is_held, held_at = True, clock()
        try:
            while not self._find(model):
                changed = self._changed
                await self.gateway.holding.wait(model.key, size, record.tenant, until)
                model = self.gateway.holding.current(model)
                if not self._find(model):
                    # Its Service answers, so its endpoints are about to be reported.
                    async with asyncio.timeout_at(until):
                        await changed.wait()
                    model = self.gateway.holding.current(model)
            return model
        except TimeoutError:
            message = f"model {str(model.key)!r} had no ready endpoint within the queue timeout; retry"
            raise ApiError.from_code("engine_unavailable", message) from None
        finally:
            record.is_held = False
            if record.trace is not None:
                record.trace.add("held", held_at, clock())
