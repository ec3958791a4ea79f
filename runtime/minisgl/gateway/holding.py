"""Requests of models that no frontend answers for, and the demand for each model, which the operator reads.

One task for each such model tries its frontends, so that a thousand requests that wait try no more often than one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final

from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.admission import Admission
from minisgl.gateway.models import Key, Model
from minisgl.gateway.upstream import Client, UpstreamError
from minisgl.scheduler.shares import has_share
from minisgl.wire.gateway import GatewayStatus, ModelDemand

_FIRST_PAUSE: Final = 0.05
_LAST_PAUSE: Final = 1.0
"""Between two attempts to reach a model's frontends, in seconds."""
_PROBE_SECONDS: Final = 5.0
PROBE_PATH: Final = "/health"
"""A frontend answers it as soon as it takes requests. A connection alone does not show that: proxies of service meshes
accept those for any pod."""


class _Demand:
    """Demand for one model. Times are the event loop's, in seconds."""

    def __init__(self, now: float) -> None:
        self.held: set[asyncio.Future[None]] = set()
        """Done when the request may be sent; or the error that it ends in."""
        self.running = 0
        """Valid requests in progress, those that are held included."""
        self.last_end = now
        self.changed = asyncio.Event()
        """The table's entry has changed."""
        self.opener: asyncio.Task[None] | None = None


class Holding:
    """All methods belong to the event loop."""

    def __init__(
        self, client: Client, find: Callable[[Key], Model | None], admission: Admission, max_bytes: int
    ) -> None:
        """`find`: returns the table's entry of a model. `max_bytes`: limit of all held bodies together."""
        self._client = client
        self._find = find
        self._admission = admission
        self._max_bytes = max_bytes
        self._bytes_of: Counter[str] = Counter()
        """Bytes of held bodies by tenant."""
        self._demand: dict[Key, _Demand] = {}
        self._arrivals: set[asyncio.Future[None]] = set()
        """Done when the next request is held."""
        self._refusal: ApiError | None = None
        """Error of requests that would have to wait, once the gateway shuts down."""

    def __len__(self) -> int:
        """Number of requests that wait."""
        return sum(len(demand.held) for demand in self._demand.values())

    def begin(self, key: Key) -> None:
        """Count a valid request for a model. The caller must `end` it."""
        demand = self._demand.get(key)
        if demand is None:
            demand = self._demand[key] = _Demand(asyncio.get_running_loop().time())
        demand.running += 1

    def end(self, key: Key) -> None:
        demand = self._demand[key]
        demand.running -= 1
        demand.last_end = asyncio.get_running_loop().time()
        self._forget_deleted(key, demand)

    async def wait(self, key: Key, size: int, tenant: str, deadline: float) -> None:
        """Hold a tenant's request, which has begun, with a body of `size` bytes until a frontend of the model answers.
        Raises ApiError when there is no room, the model cannot serve, or at the deadline."""
        if self._refusal is not None:
            raise self._refusal
        self._admission.hold(self._has_room(size, tenant), tenant)
        self._bytes_of[tenant] += size
        demand, loop = self._demand[key], asyncio.get_running_loop()
        opened = loop.create_future()
        demand.held.add(opened)
        if demand.opener is None:
            demand.opener = loop.create_task(self._open(key, demand))
        self._notify()
        try:
            async with asyncio.timeout_at(deadline):
                await opened
        except TimeoutError:
            model = self._find(key)
            reason = f" ({model.state}: {model.reason})" if model is not None and model.reason else ""
            message = f"no frontend of model {str(key)!r} answered within the queue timeout{reason}; retry"
            raise ApiError.from_code("engine_unavailable", message) from None
        finally:
            demand.held.discard(opened)
            self._bytes_of[tenant] -= size
            if not self._bytes_of[tenant]:
                del self._bytes_of[tenant]
            self._admission.leave_queue(0, tenant)
            if not demand.held and demand.opener is not None:
                demand.opener.cancel()
                demand.opener = None

    def current(self, model: Model) -> Model:
        """Return the table's entry of a model, or the last one if it was deleted."""
        return self._find(model.key) or model

    def model_changed(self, key: Key) -> None:
        """The table's entry of a model has changed: its frontends are tried at once."""
        if (demand := self._demand.get(key)) is not None:
            demand.changed.set()
            self._forget_deleted(key, demand)

    def status(self) -> GatewayStatus:
        now = asyncio.get_running_loop().time()
        return GatewayStatus(
            models={
                str(key): ModelDemand(
                    held=len(demand.held),
                    idle_seconds=0.0 if demand.running else round(now - demand.last_end, 3),
                )
                for key, demand in self._demand.items()
            }
        )

    async def wait_for_arrival(self, seconds: float) -> None:
        """Return when the next request is held, and at the latest after `seconds`."""
        arrival = asyncio.get_running_loop().create_future()
        self._arrivals.add(arrival)
        try:
            await asyncio.wait({arrival}, timeout=seconds)
        finally:
            self._arrivals.discard(arrival)

    def refuse(self, error: ApiError) -> None:
        """End all waits in an error, now and from now on."""
        self._refusal = error
        for demand in self._demand.values():
            _settle(demand, error)
        self._notify()

    def _has_room(self, size: int, tenant: str) -> bool:
        """Return whether a tenant's body may be held. One alone may."""
        most, own, held = self._max_bytes, self._bytes_of[tenant], self._bytes_of.total()
        return not held or held + size <= most or has_share(own, size, held, most, +self._bytes_of)

    def _forget_deleted(self, key: Key, demand: _Demand) -> None:
        if not demand.running and self._find(key) is None:
            del self._demand[key]

    def _notify(self) -> None:
        for arrival in self._arrivals:
            if not arrival.done():
                arrival.set_result(None)

    async def _open(self, key: Key, demand: _Demand) -> None:
        """Let the requests of a model go when a frontend answers. Ends when none waits."""
        pause = _FIRST_PAUSE
        while True:
            demand.changed.clear()
            model = self._find(key)
            problem = _problem(key, model)
            if problem is not None:
                _settle(demand, problem)
            elif model is not None and await self._answers(model):
                _settle(demand, None)
                pause = _FIRST_PAUSE
            try:
                async with asyncio.timeout(pause):
                    await demand.changed.wait()
            except TimeoutError:
                pause = min(2 * pause, _LAST_PAUSE)
            else:
                pause = _FIRST_PAUSE

    async def _answers(self, model: Model) -> bool:
        for address in model.addresses:
            try:
                status, _ = await self._client.get(address, PROBE_PATH, {}, _PROBE_SECONDS)
            except UpstreamError:
                continue
            if status == 200:
                return True
        return False


def check_serves(model: Model) -> None:
    """Raises ApiError for a model that will not answer without a change by its owner."""
    if (problem := _problem(model.key, model)) is not None:
        raise problem


def _problem(key: Key, model: Model | None) -> ApiError | None:
    if model is None:
        return ApiError(404, "model_not_found", f"model {str(key)!r} was deleted", "model")
    if model.state == "suspended":
        return ApiError.from_code("not_serving", f"model {str(key)!r} is suspended: {model.reason}")
    if model.state == "failed":
        return ApiError.from_code("engine_unavailable", f"model {str(key)!r} has failed: {model.reason}")
    return None


def _settle(demand: _Demand, error: ApiError | None) -> None:
    for opened in demand.held:
        if not opened.done():
            if error is None:
                opened.set_result(None)
            else:
                opened.set_exception(error)
                # Its request may have ended at the same time.
                opened.exception()
