"""Polls of the gateway's pods: one answer for all models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web

from minisgl.wire.status import WAIT_PARAMETER
from minisgl_operator.facts.gateway import addresses
from minisgl_operator.shell.client import ApiError, Page
from minisgl_operator.shell.gateways import Gateways, gateway_address
from minisgl_operator.shell.store import ModelKey

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
ONE, TWO = ModelKey("ns", "one"), ModelKey("ns", "two")


def pod(name: str, ip: str = "10.0.0.1", *, ready: bool = True, started: bool = True) -> Any:
    return {
        "metadata": {"name": name},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [{"name": "gateway", "started": started}],
        },
    }


class Cluster:
    """The API server, which lists the pods, and the pods' control ports."""

    def __init__(self) -> None:
        self.listed: list[Any] = []
        self.selectors: set[str] = set()
        self.fails = False
        self.answers: dict[str, Any] = {}
        self.asked = 0
        self.hanging: set[str] = set()
        self.arrived: asyncio.Event | None = None
        self.changed: list[ModelKey | None] = []
        self.requested: list[ModelKey] = []
        self.time = NOW
        self.url = ""

    def now(self) -> datetime:
        return self.time

    async def pages(self, _: Any, namespace: str, selector: str) -> AsyncIterator[Page]:
        if self.fails:
            raise ApiError(403, "Forbidden", "pods is forbidden")
        self.selectors.add(f"{namespace}: {selector}")
        yield Page(self.listed, "1")

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        if request.match_info["name"] in self.hanging:
            await asyncio.Event().wait()
        if self.arrived is not None and WAIT_PARAMETER in request.query:
            await self.arrived.wait()
        body = self.answers.get(request.match_info["name"])
        return web.Response(status=503) if body is None else web.json_response(body)


@asynccontextmanager
async def polling(cluster: Cluster) -> AsyncIterator[Gateways]:
    app = web.Application()
    app.router.add_get("/{name}/gateway/status", cluster.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    gateways = Gateways(
        *(cluster, "minisgl-system", "prod", 0.02),  # type: ignore[arg-type]
        on_change=cluster.changed.append,
        on_request=cluster.requested.append,
        address=lambda each: f"{url}/{each['metadata']['name']}",
    )
    task = asyncio.create_task(gateways.run())
    try:
        yield gateways
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await runner.cleanup()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def held(**counts: int) -> Any:
    return {"models": {f"ns/{name}": {"held": count} for name, count in counts.items()}}


async def test_one_answer_of_a_pod_wakes_the_models_that_it_names() -> None:
    cluster = Cluster()
    cluster.listed = [pod("a"), pod("b", "10.0.0.2")]
    cluster.answers = {"a": held(one=0), "b": held(two=0)}
    async with polling(cluster) as gateways:
        await until(lambda: gateways.pods)
        assert cluster.selectors == {
            "minisgl-system: app.kubernetes.io/name=minisgl-gateway,app.kubernetes.io/instance=prod"
        }
        assert cluster.changed == [None], "all models learn of the pods"
        cluster.answers["b"] = held(one=2, two=1)
        await until(lambda: len(cluster.requested) == 2)
        assert set(cluster.requested) == {ONE, TWO}
        cluster.answers["b"] = held(one=2)
        await until(lambda: TWO in cluster.changed)
        asked = cluster.asked
        await until(lambda: cluster.asked > asked + 6)
    assert len(cluster.requested) == 2 and cluster.changed == [None, TWO], "nothing else has changed"


async def test_only_ready_pods_get_requests_and_one_that_is_silent_keeps_its_answer_for_a_moment() -> None:
    cluster = Cluster()
    cluster.listed = [pod("a"), pod("b", "10.0.0.2", ready=False), pod("c", started=False)]
    cluster.answers = {"a": held(one=1), "b": held()}
    async with polling(cluster) as gateways:
        await until(lambda: gateways.pods)
        assert [each.name for each in gateways.pods or ()] == ["a", "b"]
        assert addresses(gateways.pods or ()) == ("10.0.0.1",)
        del cluster.answers["a"]
        await until(lambda: (gateways.pods or ())[0].status is None)
        assert (gateways.pods or ())[0].silent_since == NOW
        cluster.answers["a"] = held()
        await until(lambda: (gateways.pods or ())[0].status is not None)
        assert (gateways.pods or ())[0].silent_since is None


async def test_frontends_are_told_the_addresses_that_are_a_pod_s_alone() -> None:
    both, on_node = pod("both"), pod("on-node", "192.168.0.1")
    both["status"]["podIPs"] = [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}]
    on_node["spec"] = {"hostNetwork": True}
    cluster = Cluster()
    cluster.listed = [both, on_node, pod("ending", "10.0.0.2", ready=False), pod("c", "10.0.0.3", started=False)]
    async with polling(cluster) as gateways:
        assert gateways.sources() is None, "nobody was listed yet"
        await until(lambda: gateways.pods)
        assert gateways.sources() == ["10.0.0.1", "10.0.0.2", "fd00::1"]
        cluster.listed = []
        await until(lambda: gateways.sources() == [])


async def test_addresses_of_an_old_list_are_not_told_because_other_pods_may_have_them() -> None:
    cluster = Cluster()
    cluster.listed = [pod("a")]
    async with polling(cluster) as gateways:
        await until(lambda: gateways.pods)
        cluster.fails = True
        cluster.time = NOW + timedelta(seconds=30)
        assert gateways.sources() == ["10.0.0.1"]
        cluster.time = NOW + timedelta(seconds=31)
        await until(lambda: gateways.sources() is None)
        assert gateways.pods, "the gateway is not taken for lost"
        cluster.fails = False
        await until(lambda: gateways.sources() == ["10.0.0.1"])


async def test_no_number_of_pods_makes_a_probe_that_frontends_refuse() -> None:
    cluster = Cluster()
    cluster.listed = [pod(f"{n}", f"2001:db8:1111:2222:3333:4444:5555:{n + 0x1000:x}") for n in range(300)]
    async with polling(cluster) as gateways:
        await until(gateways.sources)
        assert 8_000 < len(",".join(gateways.sources() or ())) < 16 << 10


async def test_a_pod_that_hangs_delays_no_other() -> None:
    cluster = Cluster()
    cluster.listed = [pod("a"), pod("b", "10.0.0.2")]
    cluster.answers = {"a": held(), "b": held()}
    async with polling(cluster) as gateways:
        await until(lambda: gateways.pods)
        cluster.hanging = {"a"}
        cluster.answers["b"] = held(one=1)
        await until(lambda: cluster.requested == [ONE])


async def test_a_gateway_that_waits_for_a_request_is_heard_when_one_comes() -> None:
    cluster = Cluster()
    cluster.listed = [pod("a")]
    cluster.answers = {"a": held()}
    async with polling(cluster) as gateways:
        await until(lambda: gateways.pods)
        cluster.arrived, asked = asyncio.Event(), cluster.asked
        await until(lambda: cluster.asked == asked + 1)
        cluster.answers["a"] = held(one=1)
        cluster.arrived.set()
        await until(lambda: cluster.requested == [ONE])


async def test_a_pod_that_is_gone_is_asked_no_more() -> None:
    cluster = Cluster()
    cluster.listed = [pod("a"), pod("b", "10.0.0.2")]
    cluster.answers = {"a": held(one=1), "b": held()}
    async with polling(cluster) as gateways:
        await until(lambda: len(gateways.pods or ()) == 2)
        cluster.listed = [pod("b", "10.0.0.2")]
        await until(lambda: [each.name for each in gateways.pods or ()] == ["b"])
        assert ONE in cluster.changed, "its requests are gone with it"


async def test_answers_that_are_no_status_count_as_none() -> None:
    cluster = Cluster()
    cluster.listed = [pod("a")]
    cluster.answers = {"a": {"models": {"ns/one": {"held": "many"}}}}
    async with polling(cluster) as gateways:
        await until(lambda: gateways.pods)
        assert (gateways.pods or ())[0].status is None


async def test_without_a_list_nothing_is_known_and_a_later_failure_keeps_the_last_one() -> None:
    cluster = Cluster()
    cluster.fails = True
    cluster.listed = [pod("a")]
    cluster.answers = {"a": held()}
    async with polling(cluster) as gateways:
        await gateways.attempted.wait()
        assert gateways.pods is None
        cluster.fails = False
        await until(lambda: gateways.pods)
        cluster.fails = True
        asked = cluster.asked
        await until(lambda: cluster.asked > asked + 3)
        assert gateways.pods


def test_addresses_of_both_families() -> None:
    assert gateway_address(pod("a")) == "http://10.0.0.1:8001"
    assert gateway_address(pod("a", "fd00::1")) == "http://[fd00::1]:8001"
