from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from minisgl.wire.status import GATEWAYS_HEADER, SERVING_HEADER, WAIT_PARAMETER
from minisgl_operator.facts.observed import Unreachable
from minisgl_operator.facts.pods import serves_status
from minisgl_operator.shell.metrics import Metrics
from minisgl_operator.shell.probe import Prober, pod_address
from minisgl_operator.shell.store import ModelKey, Store


def pod(
    name: str = "m-r0-0", component: str = "engine", index: str = "0", phase: str = "Running", version: int = 1
) -> Any:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "ns",
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
            "labels": {
                "app.kubernetes.io/component": component,
                "apps.kubernetes.io/pod-index": index,
                "serving.minisgl.io/model": "m",
            },
        },
        "spec": {},
        "status": {"phase": phase, "podIP": "127.0.0.1"},
    }


class Pods:
    """A real HTTP server whose next answer the test chooses."""

    def __init__(self) -> None:
        self.answer: Callable[[], web.StreamResponse] = lambda: web.json_response({"kind": "engine", "ready": True})
        self.asked = 0
        self.url = ""
        self.waiting = 0
        self.waited: list[str] = []
        self.serving: list[str | None] = []
        self.gateways: list[str | None] = []
        self.held = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        self.serving.append(request.headers.get(SERVING_HEADER))
        self.gateways.append(request.headers.get(GATEWAYS_HEADER))
        if WAIT_PARAMETER in request.query:
            self.waited.append(request.query[WAIT_PARAMETER])
            self.waiting += 1
            await self.held.wait()
            self.waiting -= 1
        return self.answer()


@asynccontextmanager
async def probing(
    pods: Pods, store: Store, gateways: Callable[[], Sequence[str] | None] = lambda: None
) -> AsyncIterator[tuple[Prober, list[ModelKey]]]:
    app = web.Application()
    app.router.add_get("/status", pods.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    pods.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    woken: list[ModelKey] = []
    prober = Prober(store, woken.append, Metrics(), 0.02, lambda pod: pods.url, gateways=gateways)
    task = asyncio.create_task(prober.run())
    try:
        yield prober, woken
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await runner.cleanup()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_only_a_changed_report_queues_the_model() -> None:
    store, pods = Store(), Pods()
    store.put(pod())
    async with probing(pods, store) as (prober, woken):
        await until(lambda: pods.asked > 5)
        assert woken == [("ns", "m")]
        assert prober.reports["uid-m-r0-0"] == {"kind": "engine", "ready": True}
        pods.answer = lambda: web.json_response({"kind": "engine", "ready": False})
        await until(lambda: len(woken) == 2)


async def test_running_requests_and_seconds_of_silence_are_not_a_change() -> None:
    store, pods = Store(), Pods()
    store.put(pod("m-frontend-1", "frontend"))

    def answer() -> web.Response:
        return web.json_response(
            {
                "kind": "frontend",
                "replicas": [
                    {"replica": "m-r0", "routable": True, "running": pods.asked},
                    {"replica": "m-r1", "routable": False, "reason": f"it has said nothing for {pods.asked} s"},
                ],
            }
        )

    pods.answer = answer
    async with probing(pods, store) as (prober, woken):
        await until(lambda: pods.asked > 5)
        assert len(woken) == 1
        assert prober.reports["uid-m-frontend-1"]["replicas"][0]["running"] > 1  # type: ignore[index]


@pytest.mark.parametrize(("component", "is_told"), [("frontend", True), ("engine", False)])
async def test_frontends_are_told_which_addresses_are_the_gateway_s(component: str, is_told: bool) -> None:
    store, pods = Store(), Pods()
    store.put(model("m", "Ready"))
    store.put(pod("m-1", component))
    known: list[list[str] | None] = [None]
    async with probing(pods, store, lambda: known[0]):
        for addresses, header in ((None, None), (["10.0.0.1", "10.0.0.2"], "10.0.0.1,10.0.0.2"), ([], "")):
            known[0] = addresses
            asked = pods.asked
            # The first of them may have been on its way.
            await until(lambda asked=asked: pods.asked > asked + 2)  # type: ignore[misc]
            assert pods.gateways[-1] == (header if is_told else None)


async def test_a_frontend_report_with_the_maximum_number_of_replicas_is_accepted() -> None:
    store, pods = Store(), Pods()
    store.put(pod("m-frontend-1", "frontend"))
    reason = "its tokenizer files differ from those in use (chat_template.jinja, tokenizer.json, tokenizer_config.json)"
    entries = [
        {
            "replica": f"{'m' * 40}-r{number}",
            "revision": "0123456789",
            "epoch": [1_795_000_000_000, 1],
            "address": "10.100.100.100",
            "routable": False,
            "reason": reason,
            "waits_for_files": True,
            "running": 0,
            "waiting": 0,
        }
        for number in range(1000)
    ]
    pods.answer = lambda: web.json_response({"kind": "frontend", "replicas": entries})
    async with probing(pods, store) as (prober, woken):
        await until(lambda: woken)
        assert not isinstance(prober.reports["uid-m-frontend-1"], Unreachable)


@pytest.mark.parametrize(
    "answer",
    [
        lambda: web.Response(status=500),
        lambda: web.Response(text="not json"),
        lambda: web.json_response(["a list"]),
        lambda: web.Response(text=json.dumps({"pad": "x" * 1_100_000})),
        lambda: web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"}),
        lambda: web.Response(text="[" * 100_000),
    ],
    ids=["error", "text", "list", "large", "redirect", "deep"],
)
async def test_an_invalid_report_is_unreachable_after_the_second_probe(
    answer: Callable[[], web.StreamResponse],
) -> None:
    store, pods = Store(), Pods()
    store.put(pod())
    async with probing(pods, store) as (prober, woken):
        await until(lambda: woken)
        before = pods.asked
        pods.answer = answer
        await until(lambda: isinstance(prober.reports["uid-m-r0-0"], Unreachable))
        assert pods.asked >= before + 2
        assert len(woken) == 2


def model(name: str, phase: str) -> Any:
    metadata = {"name": name, "namespace": "ns", "uid": f"uid-{name}", "resourceVersion": "1"}
    return {
        "apiVersion": "serving.minisgl.io/v1alpha1",
        "kind": "InferenceModel",
        "metadata": metadata,
        "status": {"phase": phase},
    }


async def test_pods_of_a_starting_model_are_probed_before_hundreds_of_others() -> None:
    store, pods = Store(), Pods()
    count = 600
    store.put(model("m", "Ready"))
    for number in range(count):
        store.put(pod(f"m-r{number}-0"))
    async with probing(pods, store) as (prober, woken):
        await until(lambda: len(prober.reports) == count)
        asked = pods.asked
        assert asked < 1.1 * count, "each is asked once a round"
        starting = pod("new-0")
        starting["metadata"]["labels"]["serving.minisgl.io/model"] = "new"
        store.put(model("new", "Starting"))
        store.put(starting)
        await until(lambda: ("ns", "new") in woken)
        pods.answer = lambda: web.json_response({"kind": "engine", "ready": False})
        await until(lambda: woken.count(ModelKey("ns", "new")) == 2)
        assert pods.asked < asked + count / 2, "first, and again, before most of the others"


async def test_reports_of_deleted_pods_are_dropped() -> None:
    store, pods = Store(), Pods()
    store.put(pod())
    async with probing(pods, store) as (prober, woken):
        await until(lambda: woken)
        store.remove(pod(version=2))
        await until(lambda: not prober.reports)


async def test_a_refused_connection_is_unreachable() -> None:
    store, pods = Store(), Pods()
    store.put(pod())
    async with probing(pods, store) as (prober, _):
        pods.url = "http://127.0.0.1:1"
        await until(lambda: isinstance(prober.reports.get("uid-m-r0-0"), Unreachable))


async def test_silence_before_the_startup_probe_does_not_count_as_silence_after_it() -> None:
    store, pods = Store(), Pods()
    starting, started = pod(), pod(version=2)
    for each, has_started in ((starting, False), (started, True)):
        each["status"]["containerStatuses"] = [{"name": "engine", "started": has_started}]
    pods.answer = lambda: web.Response(status=503)
    store.put(starting)
    async with probing(pods, store) as (prober, woken):
        await until(lambda: pods.asked > 3)
        assert prober.reports["uid-m-r0-0"] == Unreachable("status 503 of /status", while_starting=True)
        before = pods.asked
        store.put(started)
        await until(lambda: prober.reports["uid-m-r0-0"] == Unreachable("status 503 of /status"))
        assert pods.asked >= before + 2, "one failed probe is not enough"
        assert len(woken) == 2


def test_member_pods_and_pods_that_do_not_run_are_not_probed() -> None:
    assert serves_status(pod())
    assert serves_status(pod(component="frontend", index="7"))
    assert serves_status(pod(component="fetch", index=""))
    assert not serves_status(pod(index="1"))
    assert not serves_status(pod(phase="Pending"))
    assert not serves_status(pod(component="fetch", phase="Succeeded"))


def test_pod_addresses_of_both_ip_families() -> None:
    one = pod()
    assert pod_address(one) == "http://127.0.0.1:8080"
    one["status"]["podIP"] = "fd00::7"
    assert pod_address(one) == "http://[fd00::7]:8080"
    del one["status"]["podIP"]
    assert pod_address(one) is None


def scaled_model(target: int | None = None, version: int = 1, **spec: Any) -> Any:
    """A model; `target`: replicas that its autoscaler has decided on."""
    if target is not None:
        spec["autoscaling"] = {"minReplicas": 0, "maxReplicas": 2, "target": {"runningPerReplica": 4}}
    return {
        "apiVersion": "serving.minisgl.io/v1alpha1",
        "kind": "InferenceModel",
        "metadata": {"name": "m", "namespace": "ns", "uid": "uid-m", "resourceVersion": str(version)},
        "spec": spec,
        "status": {} if target is None else {"autoscaling": {"targetReplicas": target}},
    }


def frontend_report(held: int = 0) -> web.Response:
    return web.json_response({"kind": "frontend", "replicas": [], "held": held, "idle_seconds": 1.5})


async def test_a_frontend_of_a_model_at_zero_is_asked_once_until_a_request_comes() -> None:
    store, pods = Store(), Pods()
    store.put(scaled_model(target=0))
    store.put(pod("m-frontend-1", "frontend"))
    store.put(pod("m-r0-0"))
    pods.answer = frontend_report
    async with probing(pods, store) as (prober, woken):
        await until(lambda: pods.waiting == 1)
        asked = pods.asked
        await until(lambda: pods.asked > asked + 5)
        assert (pods.waiting, len(pods.waited)) == (1, 1), "other pods are asked meanwhile"
        woken.clear()
        pods.answer = lambda: frontend_report(held=1)
        pods.held.set()
        await until(lambda: woken)
        assert prober.reports["uid-m-frontend-1"]["held"] == 1  # type: ignore[index]


async def test_a_model_that_has_left_zero_is_probed_as_others_are() -> None:
    store, pods = Store(), Pods()
    store.put(scaled_model(target=0))
    store.put(pod("m-frontend-1", "frontend"))
    pods.answer = frontend_report
    async with probing(pods, store):
        await until(lambda: pods.waiting == 1)
        asked = pods.asked
        store.put(scaled_model(target=1, version=2))
        await until(lambda: pods.asked > asked + 5)
        assert len(pods.waited) == 1


async def test_long_polls_that_are_answered_at_once_keep_the_pace_of_probes() -> None:
    store, pods = Store(), Pods()
    store.put(scaled_model(target=0))
    store.put(pod("m-frontend-1", "frontend"))
    pods.held.set()
    pods.answer = frontend_report
    async with probing(pods, store):
        clock = asyncio.get_running_loop().time
        await until(lambda: pods.waited)
        began, count = clock(), len(pods.waited)
        await until(lambda: len(pods.waited) >= count + 10)
        assert clock() - began >= 9 * 0.02


@pytest.mark.parametrize(("spec", "serving"), [({}, "true"), ({"suspend": True}, "false"), ({"replicas": 0}, "false")])
async def test_frontends_hear_whether_their_model_takes_requests(spec: dict[str, Any], serving: str) -> None:
    store, pods = Store(), Pods()
    store.put(scaled_model(**spec))
    store.put(pod("m-frontend-1", "frontend"))
    pods.answer = frontend_report
    async with probing(pods, store):
        await until(lambda: pods.asked > 2)
        assert set(pods.serving) == {serving}


async def test_the_first_held_request_is_a_change_and_the_next_ones_are_none() -> None:
    store, pods = Store(), Pods()
    store.put(scaled_model())
    store.put(pod("m-frontend-1", "frontend"))
    pods.answer = lambda: frontend_report(held=pods.asked // 5)
    async with probing(pods, store) as (_, woken):
        await until(lambda: pods.asked > 20)
        assert len(woken) == 2
