"""`make bench-operator`: time and memory of the operator until many models are steady, and the delay of an edit and of
the first request for a model at zero.

Half of the models are at zero: their frontends have a long poll each.

Runs on an API server without controllers: its own one, or that of `--kubeconfig`. A separate process simulates
controllers and nodes: it creates the pods, writes their status and serves their /status. The operator is a process of
its own too. The time in which the API server stores the same objects, sent by a client that does nothing else, is
measured in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp
from processes import QUIET_SECONDS, counts, each, judge, operate, prepare, process, simulate, until_steady
from simulated_nodes import create_node, pod_of, status_of

from minisgl.bench.report import Metric
from minisgl_operator.api.defaults import Defaults
from minisgl_operator.api.objects import Manifest
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.render import render
from minisgl_operator.shell.client import STATUS_MANAGER, Client, connection
from minisgl_operator.shell.resources import MODEL, POD, of_kind
from support.cluster.control_plane import running_control_plane

SECONDS_LIMIT: Final = 60.0
WRITE_TIMES_LIMIT: Final = 3.0
RSS_LIMIT_MIB: Final = 300.0
EDIT_LIMIT_SECONDS: Final = 1.0
WAKE_LIMIT_SECONDS: Final = 2.0

_DEFAULTS: Final = Defaults("minisgl-bench", "example.com/engine:1", "example.com/frontend:1")
_IN_FLIGHT: Final = 16
_EDITS: Final = 10
_WAKES: Final = 10
_CHURN_PER_SECOND: Final = 50.0


def main() -> int:
    """Print the figures; return 1 when one exceeds its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, help="an API server without controllers (default: start one)")
    parser.add_argument("--models", type=int, default=1000, help="number of InferenceModels (default: 1000)")
    parser.add_argument("--at-zero", type=int, help="number of them without replicas (default: half of them)")
    parser.add_argument("--nodes", type=int, default=1000, help="number of Nodes that are watched (default: 1000)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args()
    if options.kubeconfig is not None:
        return _run(options.kubeconfig, options)
    with tempfile.TemporaryDirectory() as folder, running_control_plane(Path(folder)) as plane:
        plane.stop("kube-controller-manager")
        return _run(plane.kubeconfig, options)


def _run(kubeconfig: Path, options: argparse.Namespace) -> int:
    at_zero = options.models // 2 if options.at_zero is None else options.at_zero
    figures = asyncio.run(_measure(kubeconfig, options.models, at_zero, options.nodes))
    longest = max(SECONDS_LIMIT, WRITE_TIMES_LIMIT * float(figures["api_server_write_s"] or 0))
    limits: dict[str, Metric] = {
        "cold_to_steady_s": longest,
        "rss_mib": RSS_LIMIT_MIB,
        "edit_in_churn_worst_s": EDIT_LIMIT_SECONDS,
        "wake_in_churn_worst_s": WAKE_LIMIT_SECONDS,
    }
    return judge("operator", figures, limits, options.json)


async def _measure(kubeconfig: Path, models: int, at_zero: int, nodes: int) -> dict[str, Metric]:
    run = f"{os.getpid():x}"
    names = [f"m{number}" for number in range(models)]
    # The first model is edited, so it must have replicas.
    zero = frozenset(names[models - at_zero :])
    async with Client(await connection(kubeconfig)) as client:
        await prepare(client, [f"bench-{run}", f"baseline-{run}"])
        await each(list(range(nodes)), lambda number: create_node(client, f"{run}-{number}"))
        print(f"{models} models, {nodes} nodes: writing the same objects without an operator", flush=True)
        objects, written = await _baseline(client, f"baseline-{run}", names, zero)
        namespace = f"bench-{run}"
        await each(
            names, lambda name: client.apply(MODEL, model(namespace, name, at_zero=name in zero), manager="bench")
        )
        print("starting the operator", flush=True)
        async with process(simulate, kubeconfig, namespace) as (_, address):
            started = time.monotonic()
            async with process(operate, kubeconfig, _DEFAULTS, namespace, address) as (operator, _):
                steady = await until_steady(client, namespace, models, operator) - started
                idle = operator.rss_mib()
                requests = await counts(operator)
                print(f"steady after {steady:.1f} s; editing and waking models while others churn", flush=True)
                async with _churning(kubeconfig, namespace, [name for name in names[1:] if name not in zero]):
                    edits = [await _edit(client, namespace, names[0], 2 + number) for number in range(_EDITS)]
                    wakes = [await _wake(client, namespace, name, address) for name in sorted(zero)[:_WAKES]]
                return {
                    "models": models,
                    "models_at_zero": at_zero,
                    "nodes": nodes,
                    "objects": objects,
                    "api_server_write_s": written,
                    "cold_to_steady_s": steady,
                    "cold_to_steady_in_write_times": steady / written,
                    "requests_per_model": requests["requests"] / models,
                    "reconciles_per_model": requests["reconciles"] / models,
                    "operator_cpu_s": requests["cpu"],
                    "rss_idle_mib": idle,
                    "rss_mib": operator.peak_rss_mib(),
                    "churn_per_s": _CHURN_PER_SECOND,
                    "edit_in_churn_median_s": statistics.median(edits),
                    "edit_in_churn_worst_s": max(edits),
                    "wake_in_churn_median_s": statistics.median(wakes) if wakes else None,
                    "wake_in_churn_worst_s": max(wakes, default=None),
                }


def model(namespace: str, name: str, frontends: int = 1, *, at_zero: bool = False) -> Manifest:
    spec: Manifest = {"model": {"source": {"pvc": {"claimName": "models"}}}, "frontend": {"replicas": frontends}}
    if at_zero:
        spec["autoscaling"] = {"minReplicas": 0, "maxReplicas": 2, "target": {"runningPerReplica": 16}}
    return {
        "apiVersion": MODEL.api_version,
        "kind": MODEL.kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec,
    }


async def _baseline(client: Client, namespace: str, names: list[str], zero: Collection[str]) -> tuple[int, float]:
    """Number of objects (children, pods, one status of each), and the seconds in which the API server stores them."""
    live = await each(
        names, lambda name: client.apply(MODEL, model(namespace, name, at_zero=name in zero), manager="bench")
    )
    parsed = [render(InferenceModel.parse(body), _DEFAULTS) for body in live]
    count = sum(len(children) for children in parsed)
    start = time.monotonic()
    await each(list(zip(live, parsed, strict=True)), lambda pair: _write(client, *pair))
    return count, time.monotonic() - start


async def _write(client: Client, owner: Manifest, children: tuple[Manifest, ...]) -> None:
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


@asynccontextmanager
async def _churning(kubeconfig: Path, namespace: str, names: list[str]) -> AsyncIterator[None]:
    """Context in which pods of models come and go."""
    # A client of its own, so that neither waits for the other's connections.
    async with Client(await connection(kubeconfig)) as client:
        churn = asyncio.create_task(_churn(client, namespace, names))
        try:
            await asyncio.sleep(QUIET_SECONDS)
            yield
        finally:
            churn.cancel()
            await asyncio.gather(churn, return_exceptions=True)


async def _wake(client: Client, namespace: str, name: str, address: str) -> float:
    """Seconds from the first request for a model at zero to its StatefulSet."""
    start = time.monotonic()
    async with aiohttp.ClientSession() as session, session.post(f"{address}/{name}/held") as answer:
        answer.raise_for_status()
    while time.monotonic() - start < SECONDS_LIMIT:
        if await client.get(of_kind("StatefulSet"), namespace, f"{name}-r0") is not None:
            break
        await asyncio.sleep(0.01)
    return time.monotonic() - start


async def _edit(client: Client, namespace: str, name: str, frontends: int) -> float:
    """Seconds from an edit to its effect on the Deployment."""
    start = time.monotonic()
    await client.apply(MODEL, model(namespace, name, frontends), manager="bench")
    while time.monotonic() - start < SECONDS_LIMIT:
        live = await client.get(of_kind("Deployment"), namespace, f"{name}-frontend")
        if live is not None and live["spec"]["replicas"] == frontends:
            break
        await asyncio.sleep(0.01)
    return time.monotonic() - start


async def _churn(client: Client, namespace: str, names: list[str]) -> None:
    """Make one engine pod after the other not ready, and then ready again."""
    slots = asyncio.Semaphore(_IN_FLIGHT)

    async def set_ready(name: str, ready: bool) -> None:
        async with slots:
            await status_of(client, POD, _leader(namespace, name), ready)

    async with asyncio.TaskGroup() as tasks:
        ready = False
        while True:
            for name in names:
                if not slots.locked():
                    tasks.create_task(set_ready(name, ready))
                await asyncio.sleep(1 / _CHURN_PER_SECOND)
            ready = not ready


def _leader(namespace: str, name: str) -> Manifest:
    return {"metadata": {"namespace": namespace, "name": f"{name}-r0-0"}, "spec": {"containers": [{"name": "engine"}]}}


if __name__ == "__main__":
    sys.exit(main())
