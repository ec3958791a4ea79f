"""The list of HTTPRoutes, of a kind that the cluster need not have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from minisgl_operator.shell.client import ApiError, Page
from minisgl_operator.shell.resources import HTTP_ROUTE, MODEL
from minisgl_operator.shell.routes import Routes
from minisgl_operator.shell.store import ModelKey, Store

KEY = ModelKey("ns", "m")


def route(version: int, **status: Any) -> Any:
    labels = {"serving.minisgl.io/model": "m"}
    metadata = {"name": "m", "namespace": "ns", "uid": "r", "resourceVersion": str(version), "labels": labels}
    return {"apiVersion": HTTP_ROUTE.api_version, "kind": HTTP_ROUTE.kind, "metadata": metadata, "status": status}


def model(**spec: Any) -> Any:
    metadata = {"name": "m", "namespace": "ns", "uid": "m", "resourceVersion": "1", "generation": 1}
    return {"apiVersion": MODEL.api_version, "kind": MODEL.kind, "metadata": metadata, "spec": spec}


class Server:
    """The API server's list of routes; an error has its HTTP status."""

    def __init__(self) -> None:
        self.routes: list[Any] = []
        self.error = 0
        self.listed = 0
        self.version = 1

    async def pages(self, *_: Any) -> AsyncIterator[Page]:
        self.listed += 1
        if self.error:
            raise ApiError(self.error, "", "refused")
        yield Page(self.routes, str(self.version))


@asynccontextmanager
async def looking(server: Server, store: Store, always: bool = True) -> AsyncIterator[tuple[Routes, list[Any]]]:
    changed: list[Any] = []
    routes = Routes(server, store, lambda: (), changed.append, always=always, seconds=0.01)  # type: ignore[arg-type]
    task = asyncio.create_task(routes.run())
    try:
        await routes.attempted.wait()
        yield routes, changed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_kind_that_comes_and_goes_concerns_all_models() -> None:
    server, store = Server(), Store()
    server.error = 404
    async with looking(server, store) as (routes, changed):
        assert (routes.served, changed) == (False, [None])
        server.error, server.routes = 0, [route(1)]
        await until(lambda: routes.served)
        assert store.get(HTTP_ROUTE.kind, "ns", "m") is not None and changed == [None, KEY, None]
        server.error = 404
        await until(lambda: routes.served is False)
        assert store.get(HTTP_ROUTE.kind, "ns", "m") is None


async def test_changed_and_deleted_routes_queue_their_model() -> None:
    server, store = Server(), Store()
    server.routes = [route(1)]
    async with looking(server, store) as (routes, changed):
        assert routes.served and changed == [KEY, None]
        server.routes = [route(2, parents=[])]
        await until(lambda: len(changed) == 3)
        server.routes, server.version = [], 3
        await until(lambda: len(changed) == 4)
        assert changed[2:] == [KEY, KEY]
        listed = server.listed
        await until(lambda: server.listed > listed + 3)
        assert len(changed) == 4


async def test_a_missing_permission_leaves_what_is_known() -> None:
    server = Server()
    server.error = 403
    async with looking(server, Store()) as (routes, changed):
        assert (routes.served, changed) == (None, [])
        server.error = 0
        await until(lambda: routes.served)
        server.error = 403
        listed = server.listed
        await until(lambda: server.listed > listed + 1)
        assert routes.served


async def test_routes_are_listed_once_unless_a_model_may_have_one() -> None:
    server, store = Server(), Store()
    store.put(model())
    async with looking(server, store, always=False):
        await asyncio.sleep(0)
        assert server.listed == 1
        store.put(model(route={}) | {"metadata": model()["metadata"] | {"resourceVersion": "2"}})
        await until(lambda: server.listed > 2)
