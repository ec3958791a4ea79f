"""Processes of the operator's benchmarks, and what they do with a cluster without controllers."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, Final

import uvloop
from simulated_nodes import Nodes

from minisgl.bench.report import Metric, report
from minisgl_operator.api.crd import NAME as CRD_NAME
from minisgl_operator.api.crd import crd
from minisgl_operator.api.defaults import Defaults
from minisgl_operator.api.objects import Manifest
from minisgl_operator.shell.client import Client, connection
from minisgl_operator.shell.config import Config
from minisgl_operator.shell.controller import Controller
from minisgl_operator.shell.metrics import Metrics
from minisgl_operator.shell.resources import MODEL
from minisgl_operator.shell.run import collect_old_objects_on_request

QUIET_SECONDS: Final = 5.0
_IN_FLIGHT: Final = 16
_GIVE_UP_SECONDS: Final = 3600.0


class Child:
    """A process of the benchmark."""

    def __init__(self, pid: int, pipe: Pipe) -> None:
        self.pid = pid
        self.pipe = pipe

    def rss_mib(self) -> float:
        return self._status("VmRSS")

    def peak_rss_mib(self) -> float:
        return self._status("VmHWM")

    def _status(self, field: str) -> float:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) / 1024
        raise RuntimeError(f"/proc/{self.pid}/status has no {field}")


@asynccontextmanager
async def process(target: Callable[..., Any], *arguments: Any) -> AsyncIterator[tuple[Child, Any]]:
    """Run `target(pipe, *arguments)` in a new interpreter; yields the process and the first object that it sends."""
    context = multiprocessing.get_context("spawn")
    pipe, child_pipe = context.Pipe()
    child = context.Process(target=target, args=(child_pipe, *arguments), daemon=True)
    child.start()
    assert child.pid is not None
    try:
        yield Child(child.pid, pipe), await asyncio.to_thread(pipe.recv)
    finally:
        child.kill()
        child.join()


def simulate(pipe: Pipe, kubeconfig: Path, namespace: str) -> None:
    """Run controllers and nodes of the namespace; sends the URL of the pods' /status."""
    asyncio.run(Nodes(namespace).run(kubeconfig, pipe))


def operate(pipe: Pipe, kubeconfig: Path, defaults: Defaults, namespace: str, address: str) -> None:
    """Run an operator for the namespace. `address`: URL of the pods' /status. Sends its counts for each message."""
    collect_old_objects_on_request()
    uvloop.run(_run_operator(pipe, kubeconfig, defaults, namespace, address))


async def _run_operator(pipe: Pipe, kubeconfig: Path, defaults: Defaults, namespace: str, address: str) -> None:
    # The watches import kopf, which the other processes do not need.
    from minisgl_operator.shell.watches import watch

    where = await connection(kubeconfig)
    metrics = Metrics()
    config = Config(defaults, watch_namespaces=(namespace,))
    async with Client(where, metrics.requested) as client:

        def answer() -> None:
            pipe.recv()
            used = os.times()
            # Events are created by POST, later and at their own rate.
            writes = sum(count for (method, _), count in metrics.requests.items() if method in ("PATCH", "DELETE"))
            pipe.send(
                {
                    "requests": metrics.requests.total(),
                    "writes": writes,
                    "reconciles": metrics.reconciles.total(),
                    "cpu": used.user + used.system,
                }
            )

        def address_of(pod: Manifest) -> str:
            return f"{address}/{pod['metadata']['name']}"

        controller = Controller(
            client, config, "bench", metrics, address=address_of, address_of_gateway=address_of_gateway
        )
        asyncio.get_running_loop().add_reader(pipe.fileno(), answer)
        pipe.send("begun")
        await controller.start()
        await watch(where, config.watch_namespaces, controller.on_watch_event)


CONTROL_URL: Final = "bench.minisgl.io/control-url"
"""Annotation of a gateway's pod: the URL of the control port of its process."""


def address_of_gateway(pod: Manifest) -> str:
    return str(pod["metadata"]["annotations"][CONTROL_URL])


async def counts(operator: Child) -> dict[str, float]:
    """Return requests, writes, reconciles and CPU seconds of an operator so far."""
    operator.pipe.send("figures")
    answer: dict[str, float] = await asyncio.to_thread(operator.pipe.recv)
    return answer


async def each(items: list[Any], step: Callable[[Any], Any]) -> list[Any]:
    """Results of `step` in the order of the items; `_IN_FLIGHT` run at a time."""
    slots = asyncio.Semaphore(_IN_FLIGHT)

    async def one(item: Any) -> Any:
        async with slots:
            return await step(item)

    return await asyncio.gather(*(one(item) for item in items))


def judge(name: str, figures: Mapping[str, Metric], limits: Mapping[str, Metric], json: str | None) -> int:
    """Print the figures beside their limits, and write them to `json`; return 1 when one exceeds its limit."""
    report(name, figures, limits, json)
    exceeded = [key for key, limit in limits.items() if float(figures[key] or 0) > float(limit or 0)]
    for key in exceeded:
        print(f"{key} exceeds its limit")
    return 1 if exceeded else 0


async def prepare(client: Client, namespaces: Iterable[str]) -> None:
    """Install the CustomResourceDefinition and create the namespaces."""
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


async def until_steady(client: Client, namespace: str, models: int, operator: Child) -> float:
    """Time of the operator's last write except Events, once every model is ready or at zero and no write has come for a
    while."""
    end = time.monotonic() + _GIVE_UP_SECONDS
    writes, last = -1.0, time.monotonic()
    ready = 0
    while time.monotonic() < end:
        now = (await counts(operator))["writes"]
        if now != writes:
            writes, last = now, time.monotonic()
        elif time.monotonic() - last > QUIET_SECONDS:
            ready = 0
            async for page in client.pages(MODEL, namespace):
                ready += sum(_is_ready(body) for body in page.items)
            if ready == models:
                return last
            last = time.monotonic()
        await asyncio.sleep(0.2)
    raise RuntimeError(f"{ready} of {models} models were ready after {_GIVE_UP_SECONDS:.0f} s")


def _is_ready(body: Manifest) -> bool:
    status = body.get("status", {})
    found = {one["type"]: one["status"] for one in status.get("conditions", ())}
    return found.get("Ready") == "True" or (status.get("phase") == "Idle" and found.get("FrontendReady") == "True")
