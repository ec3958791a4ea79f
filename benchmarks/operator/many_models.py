"""`make bench-gateway`: a gateway of two pods in front of many models, nearly all of them at zero: memory of a pod, the
time until an applied or deleted model is in the list of both, and the time until the first request for a model at zero
has its StatefulSet.

Runs as `make bench-operator` does, on an API server of its own with simulated nodes. The gateways are processes with
the permissions of a gateway's service account, and the operator reads their demand from their control ports.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
from bench import model
from processes import CONTROL_URL, Child, each, judge, operate, prepare, process, simulate, until_steady

from minisgl.bench.report import Metric
from minisgl.gateway.cluster_access import ClusterAccess
from minisgl.gateway.config import GatewayOptions
from minisgl_operator.api.defaults import Defaults
from minisgl_operator.api.objects import Manifest
from minisgl_operator.render import names
from minisgl_operator.shell.client import Client, connection
from minisgl_operator.shell.resources import MODEL, POD, of_kind
from support.cluster.control_plane import LocalControlPlane, running_control_plane
from support.gateway.cluster_account import service_account

RSS_LIMIT_MIB: Final = 400.0
LISTED_LIMIT_SECONDS: Final = 1.0
WAKE_LIMIT_SECONDS: Final = 2.0

_MODELS: Final = "models"
_HOME: Final = "gateway-home"
_INSTANCE: Final = "bench"
_PODS: Final = 2
_APPLIED: Final = 20
_WAKES: Final = 10
_DEFAULTS: Final = Defaults(_HOME, "example.com/engine:1", "example.com/frontend:1", gateway=_INSTANCE)
_GIVE_UP_SECONDS: Final = 60.0


def main() -> int:
    """Print the figures; return 1 when one exceeds its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=1000, help="number of InferenceModels (default: 1000)")
    parser.add_argument("--ready", type=int, default=10, help="number of them with a replica (default: 10)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_control_plane(Path(folder)) as plane,
        service_account(plane, _HOME, Path(folder)) as access,
    ):
        plane.stop("kube-controller-manager")
        figures = asyncio.run(_measure(plane, access, options.models, options.ready))
    limits: dict[str, Metric] = {
        "rss_mib": RSS_LIMIT_MIB,
        "listed_worst_s": LISTED_LIMIT_SECONDS,
        "wake_worst_s": WAKE_LIMIT_SECONDS,
        "pods_of_idle_models": 0,
    }
    return judge("gateway of many models", figures, limits, options.json)


async def _measure(plane: LocalControlPlane, access: ClusterAccess, models: int, ready: int) -> dict[str, Metric]:
    wanted = {f"m{number}": number >= ready for number in range(models)}
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(await connection(plane.kubeconfig)))
        await prepare(client, [_MODELS])
        await each(list(wanted.items()), lambda pair: _apply(client, *pair))
        gateways = [await stack.enter_async_context(_gateway(client, access, number)) for number in range(_PODS)]
        _, address = await stack.enter_async_context(process(simulate, plane.kubeconfig, _MODELS))
        started = time.monotonic()
        operator, _ = await stack.enter_async_context(
            process(operate, plane.kubeconfig, _DEFAULTS, _MODELS, address)
        )
        steady = await until_steady(client, _MODELS, models, operator) - started
        print(f"steady after {steady:.1f} s", flush=True)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        for gateway in gateways:
            await _until_states(session, gateway.url, wanted)
        pods = [pod async for page in client.pages(POD, _MODELS) for pod in page.items]
        idle = [pod for pod in pods if wanted[pod["metadata"]["labels"][names.MODEL_LABEL]]]
        listed = [await _listed(client, session, gateways, f"new{number}") for number in range(_APPLIED)]
        wakes = [await _wake(client, session, gateways[0].url, name) for name in sorted(wanted)[-_WAKES:]]
        return {
            "models": models,
            "models_at_zero": models - ready,
            "gateway_pods": _PODS,
            "pods_of_models": len(pods),
            "pods_of_idle_models": len(idle),
            "cold_to_steady_s": steady,
            "rss_mib": max(gateway.child.peak_rss_mib() for gateway in gateways),
            "listed_median_s": statistics.median(listed),
            "listed_worst_s": max(listed),
            "wake_median_s": statistics.median(wakes),
            "wake_worst_s": max(wakes),
        }


class _Gateway(NamedTuple):
    """A running gateway."""

    child: Child
    url: str


@asynccontextmanager
async def _gateway(client: Client, access: ClusterAccess, number: int) -> AsyncIterator[_Gateway]:
    """Run a gateway, and create its pod, which leads the operator to it."""
    async with process(_serve, access) as (child, (port, control_port)):
        labels = {names.NAME_LABEL: names.GATEWAY_APPLICATION, names.INSTANCE_LABEL: _INSTANCE}
        annotations = {CONTROL_URL: f"http://127.0.0.1:{control_port}"}
        metadata = {"name": f"gateway-{number}", "namespace": _HOME, "labels": labels, "annotations": annotations}
        containers = [{"name": "gateway", "image": "example.com/frontend:1"}]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": containers}}
        await client.create(POD, _HOME, pod)
        state = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
        container = {"name": "gateway", "ready": True, "started": True, "restartCount": 0, "image": "", "imageID": ""}
        status = {
            "phase": "Running",
            "podIP": f"192.0.2.{1 + number}",
            "podIPs": [{"ip": f"192.0.2.{1 + number}"}],
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [container | {"state": state}],
        }
        path = POD.path(_HOME, f"gateway-{number}", "status")
        await client.request("PATCH", path, {}, {"status": status}, "application/merge-patch+json")
        yield _Gateway(child, f"http://127.0.0.1:{port}")


def _serve(pipe: Pipe, access: ClusterAccess) -> None:
    from minisgl.gateway.process import GatewayServer

    server = GatewayServer(GatewayOptions(port=0, control_port=0, namespaces=(_MODELS,)), access)
    server.run(lambda port: pipe.send((port, server.control_port)))


async def _apply(client: Client, name: str, at_zero: bool) -> Manifest:
    body = model(_MODELS, name, at_zero=at_zero)
    if at_zero:
        body["spec"]["frontend"] = {"minReplicas": 0}
    return await client.apply(MODEL, body, manager="bench")


async def _states(session: aiohttp.ClientSession, url: str) -> dict[str, str]:
    async with session.get(f"{url}/v1/models") as answer:
        answer.raise_for_status()
        return {entry["id"]: entry["state"] for entry in (await answer.json())["data"]}


async def _until_states(session: aiohttp.ClientSession, url: str, wanted: dict[str, bool]) -> None:
    """Wait until each model is listed, those at zero as idle."""
    deadline = time.monotonic() + _GIVE_UP_SECONDS
    while True:
        found = await _states(session, url)
        wrong = {name for name, at_zero in wanted.items() if (found.get(name) == "idle") != at_zero}
        if not wrong and found.keys() == wanted.keys():
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(found)} models listed; not in their states: {sorted(wrong)[:5]}")
        await asyncio.sleep(0.2)


async def _listed(client: Client, session: aiohttp.ClientSession, gateways: list[_Gateway], name: str) -> float:
    """Seconds from an apply, and from the deletion, to the lists of all gateways; the longer of the two."""
    start = time.monotonic()
    await _apply(client, name, True)
    applied = await _until_listed(session, gateways, name, start, is_there=True)
    start = time.monotonic()
    await client.request("DELETE", MODEL.path(_MODELS, name))
    return max(applied, await _until_listed(session, gateways, name, start, is_there=False))


async def _until_listed(
    session: aiohttp.ClientSession, gateways: list[_Gateway], name: str, start: float, *, is_there: bool
) -> float:
    """Wait until all gateways list a model, or none does; returns the seconds since `start`."""
    while {name in await _states(session, gateway.url) for gateway in gateways} != {is_there}:
        if time.monotonic() - start > _GIVE_UP_SECONDS:
            raise RuntimeError(f"{name} is {'not' if is_there else 'still'} listed after {_GIVE_UP_SECONDS:.0f} s")
        await asyncio.sleep(0.01)
    return time.monotonic() - start


async def _wake(client: Client, session: aiohttp.ClientSession, url: str, name: str) -> float:
    """Seconds from the first request for a model at zero to its StatefulSet."""
    body = {"model": name, "messages": [{"role": "user", "content": "Hello"}]}
    start = time.monotonic()
    request = asyncio.create_task(session.post(f"{url}/v1/chat/completions", json=body).__aenter__())
    try:
        while await client.get(of_kind("StatefulSet"), _MODELS, f"{name}-r0") is None:
            if time.monotonic() - start > _GIVE_UP_SECONDS:
                raise RuntimeError(f"{name} has no StatefulSet after {_GIVE_UP_SECONDS:.0f} s")
            await asyncio.sleep(0.01)
        return time.monotonic() - start
    finally:
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)


if __name__ == "__main__":
    sys.exit(main())
