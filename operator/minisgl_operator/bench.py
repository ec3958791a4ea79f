"""`minisgl-operator bench`: how long many models take from cold to steady, in how much memory, and how soon an edit of
one is applied while the others churn.

Runs against an API server that has no controllers, and plays their part and that of the nodes: a process of its own
makes the pods, writes their status and answers for them. The operator is a process of its own too. The time in which
the API server takes the same objects, from a client that does nothing else, is measured in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, Final

from minisgl.bench.report import Metric, report
from minisgl_operator.api.crd import NAME as CRD_NAME
from minisgl_operator.api.crd import crd
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.bench_nodes import Nodes, pod_of, status_of
from minisgl_operator.facts.observed import Manifest
from minisgl_operator.render import render
from minisgl_operator.render.defaults import Defaults
from minisgl_operator.shell.client import STATUS_MANAGER, Client, Object, connection
from minisgl_operator.shell.config import Config
from minisgl_operator.shell.controller import Controller
from minisgl_operator.shell.metrics import Metrics
from minisgl_operator.shell.resources import MODEL, POD, of_kind

SECONDS_LIMIT: Final = 60.0
WRITE_TIMES_LIMIT: Final = 3.0
RSS_LIMIT_MIB: Final = 300.0
EDIT_LIMIT_SECONDS: Final = 1.0

_ENVIRONMENT: Final = Defaults("minisgl-bench", "example.com/engine:1", "example.com/frontend:1")
_IN_FLIGHT: Final = 16
_QUIET_SECONDS: Final = 5.0
_GIVE_UP_SECONDS: Final = 3600.0
_EDITS: Final = 10
_CHURN_PER_SECOND: Final = 50.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kubeconfig", type=Path, required=True, help="an API server that has no controllers")
    parser.add_argument("--models", type=int, default=1000, help="how many (1000)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")


def run_bench(options: argparse.Namespace) -> int:
    """Print the figures; 1 when one is beyond its limit."""
    figures = asyncio.run(_measure(options.kubeconfig, options.models))
    longest = max(SECONDS_LIMIT, WRITE_TIMES_LIMIT * float(figures["api_server_write_s"] or 0))
    limits: dict[str, Metric] = {
        "cold_to_steady_s": longest,
        "rss_mib": RSS_LIMIT_MIB,
        "edit_in_churn_worst_s": EDIT_LIMIT_SECONDS,
    }
    report("operator", figures, limits, options.json)
    beyond = [name for name, limit in limits.items() if float(figures[name] or 0) > float(limit or 0)]
    for name in beyond:
        print(f"{name} is beyond its limit")
    return 1 if beyond else 0


async def _measure(kubeconfig: Path, models: int) -> dict[str, Metric]:
    run = f"{os.getpid():x}"
    names = [f"m{number}" for number in range(models)]
    async with Client(await connection(kubeconfig)) as client:
        await _prepare(client, [f"bench-{run}", f"baseline-{run}"])
        print(f"{models} models: writes the same objects without an operator", flush=True)
        objects, written = await _baseline(client, f"baseline-{run}", names)
        namespace = f"bench-{run}"
        await _each(names, lambda name: client.apply(MODEL, model(namespace, name), manager="bench"))
        print("starts the operator", flush=True)
        async with _process(_simulate, kubeconfig, namespace) as (_, address):
            started = time.monotonic()
            async with _process(_operate, kubeconfig, namespace, address) as (operator, _):
                steady = await _until_steady(client, namespace, models, operator) - started
                idle = _rss_mib(operator.pid)
                requests = await _ask(operator)
                print(f"steady after {steady:.1f} s; edits one model while the others churn", flush=True)
                edits = await _edits_in_churn(kubeconfig, client, namespace, names)
                return {
                    "models": models,
                    "objects": objects,
                    "api_server_write_s": written,
                    "cold_to_steady_s": steady,
                    "cold_to_steady_in_write_times": steady / written,
                    "requests_per_model": requests["requests"] / models,
                    "reconciles_per_model": requests["reconciles"] / models,
                    "operator_cpu_s": requests["cpu"],
                    "rss_idle_mib": idle,
                    "rss_mib": _peak_rss_mib(operator.pid),
                    "churn_per_s": _CHURN_PER_SECOND,
                    "edit_in_churn_median_s": statistics.median(edits),
                    "edit_in_churn_worst_s": max(edits),
                }


def model(namespace: str, name: str, frontends: int = 1) -> Object:
    return {
        "apiVersion": MODEL.api_version,
        "kind": MODEL.kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"model": {"source": {"pvc": {"claimName": "models"}}}, "frontend": {"replicas": frontends}},
    }


async def _prepare(client: Client, namespaces: Iterable[str]) -> None:
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{CRD_NAME}"
    query = {"fieldManager": "bench", "force": "true"}
    await client.request("PATCH", path, query, crd(), "application/apply-patch+yaml")
    while True:
        live = await client.request("GET", path)
        if any(one["type"] == "Established" and one["status"] == "True" for one in live["status"]["conditions"] or ()):
            break
        await asyncio.sleep(0.1)
    for name in namespaces:
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        await client.request("POST", "/api/v1/namespaces", body=body)


async def _baseline(client: Client, namespace: str, names: list[str]) -> tuple[int, float]:
    """How many objects, and in how many seconds the API server takes them: children, pods, one status of each."""
    live = await _each(names, lambda name: client.apply(MODEL, model(namespace, name), manager="bench"))
    parsed = [render(InferenceModel.parse(body), _ENVIRONMENT) for body in live]
    count = sum(len(children) for children in parsed)
    start = time.monotonic()
    await _each(list(zip(live, parsed, strict=True)), lambda pair: _write(client, *pair))
    return count, time.monotonic() - start


async def _write(client: Client, owner: Object, children: tuple[Manifest, ...]) -> None:
    for child in children:
        resource = of_kind(child["kind"])
        live = await client.apply(resource, child)
        if child["kind"] in ("StatefulSet", "Deployment"):
            pod = await client.create(POD, owner["metadata"]["namespace"], pod_of(live, 0))
            await status_of(client, POD, pod)
            await status_of(client, resource, live)
    status = {**owner, "status": {"phase": "Ready"}}
    status["metadata"] = {name: owner["metadata"][name] for name in ("name", "namespace")}
    del status["spec"]
    await client.apply(MODEL, status, "status", STATUS_MANAGER)


async def _each(items: list[Any], step: Callable[[Any], Any]) -> list[Any]:
    """All of them, `_IN_FLIGHT` at a time, in order of the items."""
    slots = asyncio.Semaphore(_IN_FLIGHT)

    async def one(item: Any) -> Any:
        async with slots:
            return await step(item)

    return await asyncio.gather(*(one(item) for item in items))


class _Child:
    """A process of the benchmark."""

    def __init__(self, pid: int, pipe: Pipe) -> None:
        self.pid = pid
        self.pipe = pipe


@asynccontextmanager
async def _process(target: Callable[..., Any], *arguments: Any) -> AsyncIterator[tuple[_Child, Any]]:
    """Run `target(pipe, *arguments)` in a fresh interpreter; what it sends first comes along."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        yield _Child(process.pid, ours), await asyncio.to_thread(ours.recv)
    finally:
        # Nothing of it is kept.
        process.kill()
        process.join()


def _simulate(pipe: Pipe, kubeconfig: Path, namespace: str) -> None:
    asyncio.run(Nodes(namespace).run(kubeconfig, pipe))


def _operate(pipe: Pipe, kubeconfig: Path, namespace: str, address: str) -> None:
    asyncio.run(_run_operator(pipe, kubeconfig, namespace, address))


async def _run_operator(pipe: Pipe, kubeconfig: Path, namespace: str, address: str) -> None:
    # Here, as the wiring brings kopf along, which the other processes need not pay for.
    from minisgl_operator.shell.watches import watch

    where = await connection(kubeconfig)
    counts = Metrics()
    config = Config(_ENVIRONMENT, watch_namespaces=(namespace,))
    async with Client(where, counts.requested) as client:

        def answer() -> None:
            pipe.recv()
            used = os.times()
            # Events are made by POST. They come behind, at a pace of their own.
            writes = sum(count for (method, _), count in counts.requests.items() if method in ("PATCH", "DELETE"))
            pipe.send(
                {
                    "requests": counts.requests.total(),
                    "writes": writes,
                    "reconciles": counts.reconciles.total(),
                    "cpu": used.user + used.system,
                }
            )

        def where_asked(pod: Manifest) -> str:
            return f"{address}/{pod['metadata']['name']}"

        controller = Controller(client, config, "bench", counts, address=where_asked)
        asyncio.get_running_loop().add_reader(pipe.fileno(), answer)
        pipe.send("begun")
        await controller.start()
        await watch(where, config.watch_namespaces, controller.saw, controller.stop)


async def _ask(operator: _Child) -> dict[str, float]:
    operator.pipe.send("figures")
    answer: dict[str, float] = await asyncio.to_thread(operator.pipe.recv)
    return answer


async def _until_steady(client: Client, namespace: str, models: int, operator: _Child) -> float:
    """The time of the operator's last write but for Events, once every model is ready and none has come for a while."""
    end = time.monotonic() + _GIVE_UP_SECONDS
    writes, last = -1.0, time.monotonic()
    ready = 0
    while time.monotonic() < end:
        now = (await _ask(operator))["writes"]
        if now != writes:
            writes, last = now, time.monotonic()
        elif time.monotonic() - last > _QUIET_SECONDS:
            ready = 0
            async for page in client.pages(MODEL, namespace):
                ready += sum(_is_ready(body) for body in page.items)
            if ready == models:
                return last
            last = time.monotonic()
        await asyncio.sleep(0.2)
    raise RuntimeError(f"{ready} of {models} models were ready after {_GIVE_UP_SECONDS:.0f} s")


def _is_ready(body: Object) -> bool:
    conditions = body.get("status", {}).get("conditions", ())
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


async def _edits_in_churn(kubeconfig: Path, client: Client, namespace: str, names: list[str]) -> list[float]:
    """Seconds from an edit to its effect on the Deployment, while other models' pods come and go."""
    # A client of its own: neither waits for the other's connections.
    async with Client(await connection(kubeconfig)) as another:
        churn = asyncio.create_task(_churn(another, namespace, names[1:]))
        try:
            await asyncio.sleep(_QUIET_SECONDS)
            return [await _edit(client, namespace, names[0], 2 + number) for number in range(_EDITS)]
        finally:
            churn.cancel()
            await asyncio.gather(churn, return_exceptions=True)


async def _edit(client: Client, namespace: str, name: str, frontends: int) -> float:
    start = time.monotonic()
    await client.apply(MODEL, model(namespace, name, frontends), manager="bench")
    while time.monotonic() - start < SECONDS_LIMIT:
        live = await client.get(of_kind("Deployment"), namespace, f"{name}-frontend")
        if live is not None and live["spec"]["replicas"] == frontends:
            break
        await asyncio.sleep(0.01)
    return time.monotonic() - start


async def _churn(client: Client, namespace: str, names: list[str]) -> None:
    """One engine pod after the other stops and starts to be ready."""
    slots = asyncio.Semaphore(_IN_FLIGHT)

    async def turn(name: str, ready: bool) -> None:
        async with slots:
            await status_of(client, POD, _leader(namespace, name), ready)

    async with asyncio.TaskGroup() as tasks:
        ready = False
        while True:
            for name in names:
                if not slots.locked():
                    tasks.create_task(turn(name, ready))
                await asyncio.sleep(1 / _CHURN_PER_SECOND)
            ready = not ready


def _leader(namespace: str, name: str) -> Object:
    return {"metadata": {"namespace": namespace, "name": f"{name}-r0-0"}, "spec": {"containers": [{"name": "engine"}]}}


def _rss_mib(pid: int, field: str = "VmRSS") -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/{pid}/status has no {field}")


def _peak_rss_mib(pid: int) -> float:
    return _rss_mib(pid, "VmHWM")
