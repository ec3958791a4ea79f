"""The Lease on a real API server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from minisgl_operator.shell import lease as module
from minisgl_operator.shell.client import ApiError, Client, connection
from minisgl_operator.shell.lease import Lease
from minisgl_operator.shell.resources import LEASE
from support.cluster.control_plane import LocalControlPlane


@pytest.fixture
async def client(control_plane: LocalControlPlane, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    monkeypatch.setattr(module, "PERIOD", 0.05)
    async with Client(await connection(control_plane.kubeconfig)) as client:
        yield client


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


async def test_the_second_operator_acquires_the_lease_when_the_first_releases_it(client: Client) -> None:
    one, two = Lease(client, "default", "one", "handover"), Lease(client, "default", "two", "handover")
    await one.acquire()
    waiting = asyncio.create_task(two.acquire())
    await asyncio.sleep(0.2)
    assert one.held and not two.held
    await one.release()
    async with asyncio.timeout(60):
        await waiting
    assert two.held and not one.held
    live = await client.get(LEASE, "default", "handover")
    assert live is not None
    assert live["spec"]["holderIdentity"] == "two" and live["spec"]["leaseTransitions"] >= 2
    await two.release()


async def test_a_holder_that_does_not_renew_loses_the_lease(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DURATION", 1.0)
    one, two = Lease(client, "default", "one", "silent"), Lease(client, "default", "two", "silent")
    await one.acquire()
    async with asyncio.timeout(60):
        await two.acquire()
    lost: list[bool] = []
    await one.keep(lambda: lost.append(True))
    assert lost and not one.held


async def test_a_holder_that_renews_keeps_the_lease(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DURATION", 5.0)
    one, two = Lease(client, "default", "one", "busy"), Lease(client, "default", "two", "busy")
    await one.acquire()
    keeping = asyncio.create_task(one.keep(lambda: None))
    waiting = asyncio.create_task(two.acquire())
    renewed: set[str] = set()
    end = asyncio.get_running_loop().time() + 2 * module.DURATION
    while asyncio.get_running_loop().time() < end:
        live = await client.get(LEASE, "default", "busy")
        assert live is not None
        renewed.add(live["spec"]["renewTime"])
        await asyncio.sleep(0.1)
    assert len(renewed) > 1
    assert one.held and not two.held
    for task in (keeping, waiting):
        task.cancel()
    await asyncio.gather(keeping, waiting, return_exceptions=True)


async def test_a_holder_renews_a_lease_that_was_emptied(client: Client) -> None:
    one = Lease(client, "default", "one", "emptied")
    await one.acquire()
    keeping = asyncio.create_task(one.keep(lambda: None))
    for emptied in ({"spec": {"acquireTime": None}}, {"spec": None}):
        await client.merge(LEASE, "default", "emptied", emptied)
        async with asyncio.timeout(60):
            while not await _holder(client, "emptied"):
                await asyncio.sleep(0.05)
        assert one.held and not keeping.done()
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def _holder(client: Client, name: str) -> str:
    """The holder, once the Lease is complete."""
    live = await client.get(LEASE, "default", name)
    spec = (live or {}).get("spec") or {}
    return str(spec.get("holderIdentity", "")) if "acquireTime" in spec else ""


@pytest.mark.parametrize("error", [ApiError(0, "NoAnswer", "cut off"), KeyError("metadata")], ids=repr)
async def test_a_lease_that_cannot_be_renewed_is_given_up_before_it_expires(
    client: Client, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(module, "RENEW_DEADLINE", 0.5)
    one = Lease(client, "default", "one", "cut-off")
    await one.acquire()

    async def fails(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(client, "request", fails)
    lost: list[bool] = []
    async with asyncio.timeout(60):
        await one.keep(lambda: lost.append(True))
    assert lost and not one.held
