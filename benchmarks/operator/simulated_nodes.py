"""Controllers that create pods, nodes that run them, and the pods' /status, for an API server without them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from minisgl.wire.status import WAIT_PARAMETER
from minisgl_operator.api.objects import Manifest
from minisgl_operator.render.names import COMPONENT_LABEL, ENGINE, MODEL_LABEL, POD_INDEX_LABEL
from minisgl_operator.shell.client import ApiError, Client, connection
from minisgl_operator.shell.resources import CHILD_SELECTOR, NODE, POD, Resource, of_kind
from support.cluster.simulated_pods import report, running_status

_SINCE: Final = "2026-01-01T00:00:00Z"
_POLL_SECONDS: Final = 0.5
_PAUSE: Final = 4
"""Pause between two polls in units of the poll's own time: lists of thousands would load the API server."""
_IN_FLIGHT: Final = 8


def pod_of(controller: Manifest, index: int) -> Manifest:
    """The pod that the controller of a StatefulSet or Deployment would create."""
    metadata, template = controller["metadata"], controller["spec"]["template"]
    labels = dict(template["metadata"]["labels"])
    if controller["kind"] == "StatefulSet":
        labels[POD_INDEX_LABEL] = str(index)
    owner = {
        "apiVersion": controller["apiVersion"],
        "kind": controller["kind"],
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{metadata['name']}-{index}",
            "namespace": metadata["namespace"],
            "labels": labels,
            "ownerReferences": [owner],
        },
        "spec": template["spec"],
    }


async def create_node(client: Client, name: str) -> None:
    """Create a ready Node of 10 kB: like most of them, it lists 50 images."""
    await client.request("POST", NODE.path(None), body={"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
    registry = "registry.example.com/a-project-with-a-long-name/an-image-with-a-long-name"
    images = [{"names": [f"{registry}-{n}@sha256:{n:064d}", f"{registry}-{n}:1.2"], "sizeBytes": n} for n in range(50)]
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": _SINCE, "lastHeartbeatTime": _SINCE}
    body = {"status": {"conditions": [ready], "images": images}}
    await client.request("PATCH", NODE.path(None, name, "status"), {}, body, "application/merge-patch+json")


async def status_of(client: Client, resource: Resource, body: Manifest, ready: bool = True) -> Manifest:
    """Write the status of a pod that runs, or of a controller whose pods all do."""
    metadata = body["metadata"]
    status: dict[str, Any]
    if resource == POD:
        status = running_status(body, ready)
    else:
        count = body["spec"]["replicas"]
        counters = ("replicas", "readyReplicas", "updatedReplicas", "availableReplicas")
        status = {"observedGeneration": metadata["generation"], **dict.fromkeys(counters, count)}
    path = resource.path(metadata["namespace"], metadata["name"], "status")
    return await client.request("PATCH", path, {}, {"status": status}, "application/merge-patch+json")


class Nodes:
    """Creates the pods of one namespace as soon as a StatefulSet or Deployment asks for them."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._pods: dict[str, Manifest] = {}
        self._of_model: dict[str, list[Manifest]] = {}
        self._held: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """Set for models whose frontends hold a request."""

    async def run(self, kubeconfig: Path, pipe: Pipe) -> None:
        """Run until the process is killed. Sends the URL of the pods' /status through the pipe."""
        app = web.Application()
        app.router.add_get("/{name}/status", self._answer)
        app.router.add_post("/{model}/held", self._hold)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipe.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
        slots = asyncio.Semaphore(_IN_FLIGHT)
        async with Client(await connection(kubeconfig)) as client, asyncio.TaskGroup() as tasks:
            clock = asyncio.get_running_loop().time
            while True:
                began = clock()
                for kind in ("StatefulSet", "Deployment"):
                    resource = of_kind(kind)
                    async for page in client.pages(resource, self._namespace, CHILD_SELECTOR):
                        for controller in page.items:
                            for index in range(controller["spec"]["replicas"]):
                                if f"{controller['metadata']['name']}-{index}" not in self._pods:
                                    pod = pod_of(controller, index)
                                    self._pods[pod["metadata"]["name"]] = pod
                                    tasks.create_task(self._create(client, slots, resource, controller, pod))
                await asyncio.sleep(max(_POLL_SECONDS, _PAUSE * (clock() - began)))

    async def _create(
        self, client: Client, slots: asyncio.Semaphore, resource: Resource, controller: Manifest, pod: Manifest
    ) -> None:
        async with slots:
            try:
                live = await client.create(POD, self._namespace, pod)
            except ApiError:
                # Its ServiceAccount may not exist yet: the next poll tries again.
                del self._pods[pod["metadata"]["name"]]
                return
            ready = await status_of(client, POD, live)
            self._pods[pod["metadata"]["name"]] = ready
            self._of_model.setdefault(pod["metadata"]["labels"][MODEL_LABEL], []).append(ready)
            await status_of(client, resource, controller)

    async def _hold(self, request: web.Request) -> web.Response:
        """A request for a model arrives, and waits for an engine."""
        self._held[request.match_info["model"]].set()
        return web.Response()

    async def _answer(self, request: web.Request) -> web.Response:
        pod = self._pods.get(request.match_info["name"])
        if pod is None:
            return web.Response(status=503)
        labels = pod["metadata"]["labels"]
        others = self._of_model.get(labels[MODEL_LABEL], [])
        if labels[COMPONENT_LABEL] == ENGINE:
            return web.json_response(report(pod, [pod]))
        held = self._held[labels[MODEL_LABEL]]
        if WAIT_PARAMETER in request.query:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(held.wait(), float(request.query[WAIT_PARAMETER]))
        return web.json_response((report(pod, others) or {}) | {"held": int(held.is_set())})
