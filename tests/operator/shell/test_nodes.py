"""The watch of nodes against a server that plays an API server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import ClientTimeout, web

from minisgl_operator.facts.observed import NodeState
from minisgl_operator.shell import client as client_module
from minisgl_operator.shell import nodes as module
from minisgl_operator.shell.client import ApiError, Client, Connection
from minisgl_operator.shell.nodes import NodeWatch

SINCE = "2026-01-01T12:00:00Z"
UNKNOWN = NodeState("Unknown", datetime(2026, 1, 1, 12, tzinfo=UTC))


def node(name: str, ready: str | None = "True", taint: str | None = None) -> dict[str, Any]:
    """A Node with many fields that nobody reads."""
    conditions = [] if ready is None else [{"type": "Ready", "status": ready, "lastTransitionTime": SINCE}]
    images = [{"names": [f"registry.example.com/{number}"], "sizeBytes": number} for number in range(50)]
    return {
        "metadata": {"name": name, "uid": name, "resourceVersion": "7", "labels": {"zone": "a"}},
        "spec": {"taints": [{"key": taint, "effect": "NoExecute"}]} if taint else {"podCIDR": "10.0.0.0/24"},
        "status": {"conditions": [{"type": "DiskPressure", "status": "False"}, *conditions], "images": images},
    }


class Cluster:
    """Nodes by name. `send` reports to the watch that runs; `refuse` is the HTTP status of lists."""

    def __init__(self) -> None:
        self.nodes: dict[str, dict[str, Any]] = {}
        self.refuse = 0
        self.refuse_watch = 0
        self.lists = 0
        self.versions: list[str] = []
        self.events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def send(self, type: str, object: dict[str, Any]) -> None:
        self.events.put_nowait({"type": type, "object": object})

    def end_watch(self) -> None:
        self.events.put_nowait(None)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            return await self._watch(request)
        name = request.path.removeprefix("/api/v1/nodes").strip("/")
        if name:
            found = self.nodes.get(name)
            return web.json_response(found or {"kind": "Status"}, status=200 if found else 404)
        self.lists += 1
        if self.refuse:
            return web.json_response({"message": "not you"}, status=self.refuse)
        return web.json_response({"metadata": {"resourceVersion": "5"}, "items": list(self.nodes.values())})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.versions.append(request.query["resourceVersion"])
        if self.refuse_watch:
            status, self.refuse_watch = self.refuse_watch, 0
            return web.json_response({"message": "not now"}, status=status)
        response = web.StreamResponse()
        await response.prepare(request)
        while (event := await self.events.get()) is not None:
            line = json.dumps(event).encode() + b"\n"
            for part in (line[:20], line[20:]):
                await response.write(part)
        return response


class Watched:
    """A running NodeWatch. `until` waits for the next changes until a condition holds."""

    def __init__(self, client: Client) -> None:
        self.changes: list[frozenset[str] | None] = []
        self._changed = asyncio.Event()
        self.watch = NodeWatch(client, self._on_change)

    async def until(self, nodes: dict[str, NodeState] | None) -> None:
        while (None if self.watch.nodes is None else dict(self.watch.nodes)) != nodes:
            self._changed.clear()
            async with asyncio.timeout(30):
                await self._changed.wait()

    def _on_change(self, names: frozenset[str] | None) -> None:
        self.changes.append(names)
        self._changed.set()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(module, "_RELIST_SECONDS", 0.01)
    return Cluster()


@asynccontextmanager
async def watching(cluster: Cluster) -> AsyncIterator[Watched]:
    app = web.Application()
    app.router.add_get("/{path:.*}", cluster.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with Client(Connection(host=f"http://127.0.0.1:{runner.addresses[0][1]}")) as client:
        watched = Watched(client)
        task = asyncio.create_task(watched.watch.run())
        async with asyncio.timeout(30):
            await watched.watch.attempted.wait()
        yield watched
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await runner.cleanup()


async def test_readiness_and_taints_of_nodes_are_known(cluster: Cluster) -> None:
    bodies = [
        node("ready"),
        node("silent", "Unknown"),
        node("broken", "False"),
        node("off", taint="node.kubernetes.io/out-of-service"),
        node("tainted", taint="nvidia.com/gpu"),
        node("new", None),
        node("autoscaled", taint="karpenter.sh/disrupted"),
        node("cordoned") | {"spec": {"unschedulable": True}},
    ]
    cluster.nodes = {body["metadata"]["name"]: body for body in bodies}
    async with watching(cluster) as watched:
        assert watched.watch.nodes == {
            "ready": NodeState(),
            "silent": UNKNOWN,
            "broken": NodeState("False", UNKNOWN.not_ready_since),
            "off": NodeState(out_of_service=True),
            "tainted": NodeState(),
            "new": NodeState(),
            "autoscaled": NodeState(emptied=True),
            "cordoned": NodeState(emptied=True),
        }


async def test_only_changes_that_matter_are_reported(cluster: Cluster) -> None:
    cluster.nodes = {"a": node("a")}
    async with watching(cluster) as watched:
        cluster.send("BOOKMARK", {"metadata": {"resourceVersion": "8"}})
        cluster.send("MODIFIED", node("a"))
        cluster.send("MODIFIED", node("a", "Unknown"))
        await watched.until({"a": UNKNOWN})
        cluster.send("ADDED", node("b"))
        cluster.send("DELETED", node("a"))
        await watched.until({"b": NodeState()})
        assert watched.changes == [None, frozenset("a"), frozenset("b"), frozenset("a")]


async def test_a_watch_that_ends_continues_where_it_ended(cluster: Cluster) -> None:
    async with watching(cluster) as watched:
        cluster.send("BOOKMARK", {"metadata": {"resourceVersion": "9"}})
        cluster.end_watch()
        cluster.send("ADDED", node("late"))
        await watched.until({"late": NodeState()})
        assert cluster.versions == ["5", "9"] and cluster.lists == 1


async def test_a_watch_that_ends_immediately_is_not_begun_again_at_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RELIST_SECONDS", 3600)
    async with watching(cluster) as watched:
        for _ in range(5):
            cluster.end_watch()
        for _ in range(20):
            await watched.watch.read("any")
        assert cluster.versions == ["5"]


async def test_a_silent_watch_continues_where_it_ended(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost connection reports nothing, for as long as the network does not say that it is lost."""
    monkeypatch.setattr(client_module, "_WATCH_TIMEOUT", ClientTimeout(sock_read=0.05))
    async with watching(cluster) as watched:
        cluster.send("BOOKMARK", {"metadata": {"resourceVersion": "9"}})
        async with asyncio.timeout(30):
            while "9" not in cluster.versions:
                await asyncio.sleep(0.01)
        cluster.send("ADDED", node("late"))
        await watched.until({"late": NodeState()})
        assert cluster.lists == 1


@pytest.mark.parametrize("code", [410, 500])
async def test_a_watch_that_breaks_begins_with_a_new_list(cluster: Cluster, code: int) -> None:
    """410: its version has expired. After a restore of the database, versions of the new list are lower."""
    cluster.nodes = {"a": node("a")}
    async with watching(cluster) as watched:
        cluster.nodes = {"b": node("b")}
        cluster.send("ERROR", {"kind": "Status", "code": code, "message": "no"})
        await watched.until({"b": NodeState()})
        assert cluster.lists == 2


@pytest.mark.parametrize("refused", ["list", "watch"])
async def test_the_permission_may_come_and_go(cluster: Cluster, refused: str) -> None:
    cluster.refuse = 403
    async with watching(cluster) as watched:
        assert watched.watch.nodes is None
        cluster.nodes = {"a": node("a")}
        cluster.refuse = 0
        await watched.until({"a": NodeState()})
        cluster.refuse = 403
        if refused == "watch":
            cluster.refuse_watch = 403
            cluster.end_watch()
        else:
            cluster.send("ERROR", {"kind": "Status", "code": 410, "message": "expired"})
        await watched.until(None)


async def test_an_outage_changes_nothing(cluster: Cluster) -> None:
    cluster.nodes = {"a": node("a")}
    async with watching(cluster) as watched:
        cluster.refuse_watch = 500
        cluster.end_watch()
        cluster.send("ADDED", node("b"))
        await watched.until({"a": NodeState(), "b": NodeState()})
        assert None not in watched.changes[1:]


async def test_a_node_is_read_from_the_server(cluster: Cluster) -> None:
    cluster.nodes = {"a": node("a", "Unknown")}
    async with watching(cluster) as watched:
        cluster.nodes = {"a": node("a")}
        assert await watched.watch.read("a") == NodeState()
        assert watched.watch.nodes == {"a": NodeState()}
        cluster.nodes = {}
        assert await watched.watch.read("a") is None
        assert watched.watch.nodes == {}


async def test_a_watch_without_a_server_fails(cluster: Cluster) -> None:
    async with Client(Connection(host="http://127.0.0.1:9")) as client:
        with pytest.raises(ApiError) as error:
            async for _ in client.watch(module.NODE, "1"):
                raise AssertionError("there is nobody")
    assert error.value.status == 0
