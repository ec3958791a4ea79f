"""Loss of a Lease, with a clock that advances only while the loop is idle."""

from __future__ import annotations

import asyncio
from typing import Any

from minisgl_operator.api.objects import Manifest
from minisgl_operator.shell.client import ApiError
from minisgl_operator.shell.lease import ATTEMPT, PERIOD, RENEW_DEADLINE, Lease
from minisgl_operator.shell.resources import Resource
from support.skipping_loop import SkippingLoop


class Server:
    """Stores a renewal immediately, answers as late as possible, and is unreachable afterwards."""

    def __init__(self) -> None:
        self.lease: Manifest | None = None
        self.renewed: float | None = None

    async def get(self, *_: Any) -> Manifest | None:
        if self.renewed is not None:
            raise ApiError(0, "NoAnswer", "gone")
        return self.lease

    async def create(self, _: Resource, __: str, body: Manifest) -> None:
        self.lease = body | {"metadata": body["metadata"] | {"resourceVersion": "1"}}

    async def replace(self, *_: Any) -> None:
        self.renewed = asyncio.get_running_loop().time()
        await asyncio.sleep(ATTEMPT - 0.1)


def test_a_late_renewal_counts_from_the_time_of_its_request() -> None:
    server: Any = Server()
    lost: list[float] = []

    async def hold() -> None:
        lease = Lease(server, "default", "one", "late")
        await lease.acquire()
        await lease.keep(lambda: lost.append(asyncio.get_running_loop().time()))

    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        runner.run(hold())
    assert server.renewed is not None
    assert lost[0] - server.renewed <= RENEW_DEADLINE + PERIOD, "it counts from the answer"


class Hanging(Server):
    """Never answers the first request after the Lease was acquired."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs = True

    async def get(self, *_: Any) -> Manifest | None:
        if self.lease is not None and self.hangs:
            self.hangs = False
            await asyncio.Event().wait()
        return self.lease

    async def replace(self, *_: Any) -> None:
        self.renewed = asyncio.get_running_loop().time()


def test_a_connection_that_hangs_does_not_cost_the_lease() -> None:
    server: Any = Hanging()
    lost: list[float] = []

    async def hold() -> None:
        lease = Lease(server, "default", "one", "hanging")
        await lease.acquire()
        keeping = asyncio.create_task(lease.keep(lambda: lost.append(asyncio.get_running_loop().time())))
        await asyncio.sleep(3 * RENEW_DEADLINE)
        keeping.cancel()

    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        runner.run(hold())
    assert not server.hangs and not lost
