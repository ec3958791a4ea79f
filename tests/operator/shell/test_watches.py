"""Watches of an API server that breaks them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp import web

from minisgl_operator.shell import watches
from minisgl_operator.shell.client import Connection
from minisgl_operator.shell.resources import WATCHED, Resource
from support.cluster.operated_cluster import LoopThread

ALWAYS = 1000
# kopf begins only when these are served, too.
SERVED = (
    *WATCHED,
    Resource("", "v1", "namespaces", "Namespace"),
    Resource("", "v1", "events", "Event"),
    Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition"),
)


class BreakingServer:
    """Serves every kind without objects. `errors` watches of Services end with an ERROR event; the next one reports a
    Service."""

    def __init__(self, errors: int) -> None:
        self.errors = errors

    async def handle(self, request: web.Request) -> web.StreamResponse:
        kinds = [each for each in SERVED if request.path == each.path(None)]
        if not kinds:
            return web.json_response(_discovery(request.path))
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": "7"}, "items": []})
        response = web.StreamResponse()
        await response.prepare(request)
        if kinds[0].kind == "Service":
            await response.write(json.dumps(self._event()).encode() + b"\n")
        await asyncio.sleep(ALWAYS)
        return response

    def _event(self) -> dict[str, Any]:
        if self.errors > 0:
            self.errors -= 1
            status = {"kind": "Status", "code": 500, "message": "etcd has no leader"}
            return {"type": "ERROR", "object": status}
        metadata = {"name": "found", "namespace": "team-a", "uid": "u", "resourceVersion": "8"}
        return {"type": "ADDED", "object": {"metadata": metadata}}


Serve = Callable[[BreakingServer], Connection]


def _discovery(path: str) -> dict[str, Any]:
    groups = sorted({(each.group, each.version) for each in SERVED if each.group})
    if path == "/api":
        return {"versions": ["v1"]}
    if path == "/apis":
        versions = [(group, {"version": version}) for group, version in groups]
        return {"groups": [{"name": group, "versions": [one], "preferredVersion": one} for group, one in versions]}
    here = [each for each in SERVED if path == each.path(None).rpartition("/")[0]]
    return {"resources": [_described(each) for each in here]}


def _described(resource: Resource) -> dict[str, Any]:
    verbs = ["list", "watch", "patch"]
    return {
        "name": resource.plural,
        "singularName": "",
        "kind": resource.kind,
        "namespaced": True,
        "verbs": verbs,
    }


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Start a server in a loop of its own: kopf takes every task of its loop for one of its own."""
    monkeypatch.setattr(watches, "_FIRST_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(watches, "_LAST_RETRY_SECONDS", 0.002)
    thread = LoopThread()
    runners = []

    async def begin(server: BreakingServer) -> Connection:
        app = web.Application()
        app.router.add_get("/{path:.*}", server.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return Connection(host=f"http://127.0.0.1:{runner.addresses[0][1]}")

    yield lambda server: thread.run(begin(server))
    for runner in runners:
        thread.run(runner.cleanup())
    thread.close()


async def test_a_watch_that_breaks_begins_again(serve: Serve) -> None:
    """An API server that loses its database for a moment ends watches with an error that is not 410."""
    server = BreakingServer(errors=2)
    starts: list[None] = []

    def on_event(type: str | None, body: dict[str, Any]) -> None:
        assert body["metadata"]["name"] == "found"
        task.cancel()

    watch = watches.watch(serve(server), (), on_event, lambda: starts.append(None))
    task = asyncio.create_task(watch)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.errors == 0
    # A watch may break, or the event arrive, before kopf reports that all of them have begun.
    assert len(starts) <= 3


async def test_a_watch_that_stays_broken_ends_with_its_error(serve: Serve) -> None:
    server = BreakingServer(errors=ALWAYS)
    with pytest.raises(Exception, match="etcd has no leader"):
        await watches.watch(serve(server), (), lambda *_: None)
    assert ALWAYS - server.errors == 3


async def test_a_missing_definition_is_not_waited_for(serve: Serve) -> None:
    """The process restarts, and waits for it before it watches."""

    lists: list[str] = []

    class Missing(BreakingServer):
        async def handle(self, request: web.Request) -> web.StreamResponse:
            if not request.path.endswith("/inferencemodels"):
                return await super().handle(request)
            lists.append(request.path)
            return web.json_response({"kind": "Status", "code": 404, "message": "not here"}, status=404)

    with pytest.raises(Exception, match="not here"):
        await watches.watch(serve(Missing(errors=0)), (), lambda *_: None)
    assert len(lists) == 1


async def test_watches_that_do_not_end_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task of kopf that waits in its own `finally` ignores its cancellation."""
    begun, release = asyncio.Event(), asyncio.Event()

    async def never_ends(**_: Any) -> None:
        begun.set()
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()

    monkeypatch.setattr(watches.kopf, "operator", never_ends)
    monkeypatch.setattr(watches, "_END_SECONDS", 0.01)
    task = asyncio.create_task(watches.watch(Connection(host="http://127.0.0.1:1"), (), lambda *_: None))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
