"""A namespace on a real API server whose pods only seem to run, and operators that work on it.

The test's own requests, the pretended kubelet and the pods' answers live in one event loop of a thread; each operator
lives in a loop of its own, as kopf takes every task of its loop for one of its own.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self, TypeVar

import msgspec
import uvloop
from aiohttp import web

from minisgl.wire.peer_secret import PeerSecret
from minisgl.wire.status import GATEWAYS_HEADER, SECRET_HEADER, WAIT_PARAMETER
from minisgl_operator.api.crd import crd
from minisgl_operator.api.defaults import Defaults, ModelDefaults
from minisgl_operator.api.objects import Manifest
from minisgl_operator.render.names import (
    GATEWAY_APPLICATION,
    INSTANCE_LABEL,
    MODEL_LABEL,
    NAME_LABEL,
    PEERS_VOLUME,
)
from minisgl_operator.shell.client import ApiError, Client, connection
from minisgl_operator.shell.config import Config
from minisgl_operator.shell.controller import Controller
from minisgl_operator.shell.gateways import gateway_address
from minisgl_operator.shell.metrics import Metrics
from minisgl_operator.shell.resources import CHILD_SELECTOR, CHILDREN, MODEL, NODE, POD, SECRET, of_kind
from minisgl_operator.shell.watches import watch
from support.cluster.control_plane import LocalControlPlane
from support.cluster.kstatus import Health, kstatus
from support.cluster.simulated_pods import report, running_status

T = TypeVar("T")
SECONDS: Final = 120.0
_numbers = itertools.count(1)
WRITES: Final = ("POST", "PUT", "PATCH", "DELETE")


def pvc_model(name: str, **spec: Any) -> Manifest:
    """A model on a PVC; `spec` is merged into the rest."""
    return {
        "apiVersion": MODEL.api_version,
        "kind": MODEL.kind,
        "metadata": {"name": name},
        "spec": {"model": {"source": {"pvc": {"claimName": "models"}}}, **spec},
    }


def hub_model(name: str, repo: str = "owner/name", **spec: Any) -> Manifest:
    """A model from the Hub."""
    return pvc_model(name, model={"source": {"huggingFace": {"repo": repo}}}, **spec)


class LoopThread:
    """A thread with its own event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, step: Coroutine[Any, Any, T], seconds: float = SECONDS) -> T:
        return asyncio.run_coroutine_threadsafe(step, self.loop).result(seconds)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


class CrashingClient(Client):
    """Plays a process that is killed just after its `writes`-th write took effect: it sends nothing afterwards."""

    def __init__(self, where: Any, heard: Callable[[str, int], None], writes: int | None) -> None:
        super().__init__(where, heard)
        self._left = writes
        self.crashed = threading.Event()

    async def request(self, method: str, *args: Any, **more: Any) -> Manifest:
        if self.crashed.is_set():
            await asyncio.Event().wait()
        answer = await super().request(method, *args, **more)
        # Access reviews write nothing, and nothing depends on Events.
        silent = args[0].endswith(("/events", "/selfsubjectaccessreviews"))
        if self._left is not None and method in WRITES and not silent:
            self._left -= 1
            if self._left <= 0:
                self.crashed.set()
                await asyncio.Event().wait()
        return answer


class RunningOperator:
    """One operator in a thread, without a Lease, which has its own tests."""

    def __init__(
        self,
        config: Config,
        address: Callable[[Manifest], str | None],
        crash_after: int | None = None,
        address_of_gateway: Callable[[Manifest], str] = gateway_address,
    ) -> None:
        self.config = config
        self.counts = Metrics()
        self.error: BaseException | None = None
        self.controller: Controller | None = None
        self.crashed = threading.Event()
        self.started = threading.Event()
        self._begun = threading.Event()
        self._address = address
        self._address_of_gateway = address_of_gateway
        self._crash_after = crash_after
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._begun.wait(SECONDS)
        if self._loop is not None and self._task is not None and self._thread.is_alive():
            with suppress(RuntimeError):
                # It may have ended in this moment.
                self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), "the operator does not end"

    def call(self, function: Callable[[Controller], T]) -> T:
        """Run `function` in the operator's thread."""

        async def step() -> T:
            assert self.controller is not None
            return function(self.controller)

        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(step(), self._loop).result(SECONDS)

    def writes(self) -> int:
        """Number of writing requests so far."""
        return sum(count for (method, _), count in self.counts.requests.items() if method in WRITES)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            uvloop.run(self._main())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self.error = error

    def _end(self) -> None:
        assert self._task is not None
        self._task.cancel()

    async def _main(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._begun.set()
        where = await connection(self.config.kubeconfig)
        client = CrashingClient(where, self.counts.requested, self._crash_after)
        self.crashed = client.crashed
        async with client:
            self.controller = Controller(
                *(client, self.config, "test", self.counts),
                address=self._address,
                on_restart=self._end,
                address_of_gateway=self._address_of_gateway,
            )
            try:
                await self.controller.start()
                self.started.set()
                await watch(where, self.controller.namespaces, self.controller.on_watch_event)
            finally:
                await self.controller.stop()


class OperatedCluster:
    """`hold` keeps pods Pending whose name it accepts; `statuses` and `reports`, by name, replace the simulated ones of
    a pod (None: it does not answer). `loads`, by model, are fields of its frontends' reports; `requests` has the number
    of requests of each replica. `gateways` has the answers of the gateway's pods by name."""

    def __init__(self, control_plane: LocalControlPlane, *, with_crd: bool = True) -> None:
        self.control_plane = control_plane
        self._with_crd = with_crd
        self.namespace = f"operated-{next(_numbers)}"
        self.hold: Callable[[str], bool] = lambda name: False
        self.statuses: dict[str, Manifest] = {}
        self.reports: dict[str, Manifest | None] = {}
        self.loads: dict[str, dict[str, Any]] = {}
        self.requests: dict[str, int] = {}
        self.gateways: dict[str, Manifest] = {}
        self.told_to_refuse: dict[str, bool] = {}
        """Pod → whether the last probe told it to refuse others than the model's pods."""
        self.told_gateways: dict[str, str | None] = {}
        """Pod → addresses of the gateway in the last probe."""
        self._tokens = TemporaryDirectory(prefix="minisgl-tokens-")
        self._pods: list[Manifest] = []
        self._has_node = False
        self._thread = LoopThread()
        self._client: Client | None = None
        self._operators: list[RunningOperator] = []

    def __enter__(self) -> Self:
        if self._with_crd and MODEL.title not in self.control_plane.definitions:
            self.install()
        self._thread.run(self._begin())
        return self

    def __exit__(self, *_: object) -> None:
        for operator in self._operators:
            operator.stop()
        self._thread.run(self._end())
        self._thread.close()

    # Actions of users

    def install(self) -> None:
        """Install the CRD."""
        self.control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(crd()))
        self.control_plane.wait_for_definition(MODEL.title)
        self.control_plane.definitions.add(MODEL.title)

    def apply(self, body: Manifest) -> Manifest:
        """Create or change an object in this namespace, as kubectl does."""
        body = {**body, "metadata": {**body["metadata"], "namespace": self.namespace}}
        return self.run(self.client.apply(of_kind(body["kind"]), body, manager="test"))

    def get(self, kind: str, name: str) -> Manifest | None:
        return self.run(self.client.get(of_kind(kind), self.namespace, name))

    def list(self, kind: str, selector: str = "") -> list[Manifest]:
        async def step() -> list[Manifest]:
            return [
                item async for page in self.client.pages(of_kind(kind), self.namespace, selector) for item in page.items
            ]

        return self.run(step())

    def merge(self, kind: str, name: str, body: Manifest, subresource: str | None = None) -> Manifest:
        path = of_kind(kind).path(self.namespace, name, subresource)
        return self.run(self.client.request("PATCH", path, {}, body, "application/merge-patch+json"))

    def delete(self, kind: str, name: str, propagation: str = "Background") -> None:
        live = self.get(kind, name)
        if live is not None:
            self.run(self.client.delete(of_kind(kind), self.namespace, name, live["metadata"]["uid"], propagation))

    def start_gateway(self, name: str, instance: str, address: str) -> None:
        """A pod of the gateway of a release in this namespace, which runs."""
        labels = {NAME_LABEL: GATEWAY_APPLICATION, INSTANCE_LABEL: instance}
        pod: Manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels},
            "spec": {"containers": [{"name": "gateway", "image": "gateway"}]},
        }
        self.gateways[name] = {"models": {}}
        self.apply(pod)
        status = running_status(pod) | {"podIP": address, "podIPs": [{"ip": address}]}
        self.merge(POD.kind, name, {"status": status}, "status")

    def lose_node_of(self, pod: str) -> None:
        """Delete the pod on a node that is lost and does not confirm its end."""
        self.place_on_lost_node(pod)
        self.end_soon(pod)

    def end_soon(self, pod: str) -> None:
        """kubectl delete pod, also of a deleted pod with a long grace period."""
        self.control_plane.kubectl("delete", "pod", pod, "-n", self.namespace, "--grace-period=1", "--wait=false")

    def place_on_lost_node(self, pod: str) -> None:
        """Leave the pod without a kubelet that confirms its end, on a node that has not been ready for an hour."""
        self.place_on_node(pod, ready=False)

    def place_on_node(self, pod: str, *, ready: bool) -> None:
        """Bind the pod to this namespace's node, which does not confirm its end. A ready node has a process that
        hangs."""
        self.set_node(ready=ready)
        target = {"apiVersion": "v1", "kind": "Node", "name": self.node}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
        self.run(self.client.request("POST", POD.path(self.namespace, pod, "binding"), {}, binding))

    @property
    def node(self) -> str:
        """Name of the node on which pods do not end."""
        return f"node-of-{self.namespace}"

    def set_node(self, *, ready: bool, tainted: bool = False, since: datetime | None = None) -> None:
        """Create or change this namespace's node, which has been ready or silent `since` then; None: for an hour."""
        self._has_node = True
        taint = {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}
        spec = {"taints": [taint] if tainted else []}
        self.control_plane.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": self.node}, "spec": spec})
        since = since or datetime.now(UTC) - timedelta(hours=1)
        condition = {
            "type": "Ready",
            "status": "True" if ready else "Unknown",
            "lastTransitionTime": since.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        path = NODE.path(None, self.node, "status")
        body = {"status": {"conditions": [condition]}}
        self.run(self.client.request("PATCH", path, {}, body, "application/merge-patch+json"))

    def delete_node(self) -> None:
        self.control_plane.kubectl("delete", "node", self.node)

    # Observations

    def status(self, name: str) -> Manifest:
        live = self.get(MODEL.kind, name)
        return {} if live is None else dict(live.get("status", {}))

    def condition(self, name: str, type: str) -> Manifest:
        for condition in self.status(name).get("conditions", ()):
            if condition["type"] == type:
                return dict(condition)
        return {}

    def ready(self, name: str) -> bool:
        """True if the condition Ready is True for the current spec."""
        model = self.get(MODEL.kind, name)
        if model is None or model.get("status", {}).get("observedGeneration") != model["metadata"]["generation"]:
            return False
        return any(one["type"] == "Ready" and one["status"] == "True" for one in model["status"]["conditions"])

    def wait_as_users_do(self, name: str, condition: str) -> None:
        """Run `kubectl wait` until a condition of the model is True."""
        self.control_plane.kubectl(
            *("-n", self.namespace, "wait", f"--for=condition={condition}", f"--timeout={SECONDS:.0f}s"),
            f"inferencemodel/{name}",
        )

    def health(self, name: str) -> Health:
        """What kstatus makes of the model."""
        live = self.get(MODEL.kind, name)
        assert live is not None
        return kstatus(live)

    def children(self, name: str) -> dict[tuple[str, str], Manifest]:
        """All objects that the model owns, by kind and name."""
        owned = {}
        for resource in CHILDREN:
            for body in self.list(resource.kind):
                # The model's Service, which owns EndpointSlices, has its name.
                owners = body["metadata"].get("ownerReferences", ())
                if any((owner["kind"], owner["name"]) == (MODEL.kind, name) for owner in owners):
                    owned[resource.kind, body["metadata"]["name"]] = body
        return owned

    def until(self, condition: Callable[[], T], what: str, seconds: float = SECONDS) -> T:
        """Wait until `condition` returns a true value; return it. It is asked less often the longer this takes."""
        start = time.monotonic()
        end = start + seconds
        while True:
            found = condition()
            if found:
                return found
            if time.monotonic() > end:
                broken = [operator.error for operator in self._operators if operator.error is not None]
                models = {one["metadata"]["name"]: one.get("status") for one in self.list(MODEL.kind)}
                raise AssertionError(f"{what} did not come in {seconds:.0f} s; operators: {broken}; models: {models}")
            time.sleep(min(0.5, max(0.05, (time.monotonic() - start) / 10)))

    def until_quiet(self, operator: RunningOperator) -> None:
        """Wait until the operator has been idle for a second, after the events of its own writes."""
        calm, end = 0, time.monotonic() + 2 * SECONDS
        while calm < 10:
            assert time.monotonic() < end, "the operator does not come to rest"
            time.sleep(0.1)
            calm = calm + 1 if operator.call(lambda controller: controller.idle) else 0

    # Operators

    @contextmanager
    def operator(self, **settings: Any) -> Iterator[RunningOperator]:
        running = self.start_operator(**settings)
        try:
            yield running
        finally:
            running.stop()

    def start_operator(
        self,
        *,
        resync_seconds: float = 600.0,
        probe_seconds: float = 0.2,
        kubeconfig: Path | None = None,
        crash_after: int | None = None,
        also: tuple[str, ...] = (),
        others: Sequence[OperatedCluster] = (),
        version: int = 1,
        models: ModelDefaults | None = None,
        gateway: str | None = None,
    ) -> RunningOperator:
        """Start an operator for this namespace, those in `also`, and those of `others`, whose pods it probes as well.
        `crash_after` is a number of writes. `version` is the tag of its images."""
        engine, frontend = f"example.com/engine:{version}", f"example.com/frontend:{version}"
        config = Config(
            defaults=Defaults(self.namespace, engine, frontend, gateway=gateway, models=models or ModelDefaults()),
            watch_namespaces=(*also, *(other.namespace for other in others), self.namespace),
            resync_seconds=resync_seconds,
            probe_seconds=probe_seconds,
            kubeconfig=kubeconfig or self.control_plane.kubeconfig,
        )
        clusters = {each.namespace: each for each in (self, *others)}

        def address(pod: Manifest) -> str | None:
            return clusters.get(pod["metadata"]["namespace"], self)._address(pod)

        running = RunningOperator(config, address, crash_after, self._address)
        self._operators.append(running)
        return running

    # Simulated nodes

    @property
    def client(self) -> Client:
        assert self._client is not None
        return self._client

    def run(self, step: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(step)

    def _address(self, pod: Manifest) -> str:
        return f"{self._url}/{pod['metadata']['name']}"

    async def _begin(self) -> None:
        self._client = await Client(await connection(self.control_plane.kubeconfig)).__aenter__()
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}}
        await self.client.request("POST", "/api/v1/namespaces", {}, body)
        app = web.Application()
        app.router.add_get("/{name}/status", self._answer)
        app.router.add_get("/{name}/gateway/status", self._answer_of_gateway)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._nodes = [asyncio.create_task(self._follow_pods()), asyncio.create_task(self._run_pods())]

    async def _end(self) -> None:
        for task in self._nodes:
            task.cancel()
        await asyncio.gather(*self._nodes, return_exceptions=True)
        await self._runner.cleanup()
        nodes = [NODE.path(None, self.node)] if self._has_node else []
        for path in (f"/api/v1/namespaces/{self.namespace}", *nodes):
            with suppress(ApiError):
                await self.client.request("DELETE", path)
        await self.client.__aexit__()
        self._tokens.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        self.told_to_refuse[name] = request.headers.get(SECRET_HEADER) == "required"
        self.told_gateways[name] = request.headers.get(GATEWAYS_HEADER)
        body = self.reports[name] if name in self.reports else self._report(name)
        if body is not None and WAIT_PARAMETER in request.query:
            # A frontend answers when a request comes.
            end = time.monotonic() + float(request.query[WAIT_PARAMETER])
            while body is not None and not body.get("held") and time.monotonic() < end:
                await asyncio.sleep(0.02)
                body = self._report(name)
        return web.Response(status=503) if body is None else web.json_response(body)

    async def _answer_of_gateway(self, request: web.Request) -> web.Response:
        body = self.gateways.get(request.match_info["name"])
        return web.Response(status=503) if body is None else web.json_response(body)

    def _report(self, name: str) -> Manifest | None:
        for pod in self._pods:
            if pod["metadata"]["name"] == name:
                found = report(pod, self._pods)
                if found is not None:
                    found["peer_secret"] = self._fingerprints(pod)
                model = pod["metadata"]["labels"][MODEL_LABEL]
                if found is not None and found["kind"] == "frontend":
                    found |= self.loads.get(model, {})
                    for entry in found["replicas"]:
                        entry["running"] = self.requests.get(entry["replica"], 0)
                return found
        return None

    def _fingerprints(self, pod: Manifest) -> dict[str, str]:
        """What a pod reports about the tokens that its kubelet has mounted."""
        mounted = [volume for volume in pod["spec"]["volumes"] if volume["name"] == PEERS_VOLUME]
        folder = Path(self._tokens.name) / pod["metadata"]["labels"][MODEL_LABEL]
        return PeerSecret(str(folder)).fingerprints() if mounted else {}

    async def _mount_tokens(self) -> None:
        """Write the tokens of each model as kubelets do, though at once for all pods."""
        mounted: set[Path] = set()
        async for page in self.client.pages(SECRET, self.namespace, CHILD_SELECTOR):
            for body in page.items:
                folder = Path(self._tokens.name) / body["metadata"]["labels"][MODEL_LABEL]
                folder.mkdir(exist_ok=True)
                mounted.add(token := folder / body["metadata"]["name"][-1])
                token.write_bytes(base64.b64decode(body["data"]["token"]))
        for token in set(Path(self._tokens.name).glob("*/*")) - mounted:
            token.unlink()

    async def _follow_pods(self) -> None:
        """Keep `_pods`, by a watch: a list every moment takes much of the time of the API server."""
        while True:
            with suppress(ApiError):
                version, pods = "", list[Manifest]()
                async for page in self.client.pages(POD, self.namespace, CHILD_SELECTOR):
                    version, pods = page.resource_version, pods + page.items
                self._pods = pods
                async for line in self.client.watch(POD, version):
                    event = msgspec.json.decode(line)
                    if event["type"] == "ERROR":
                        break
                    self._on_event(event["type"], event["object"])
            await asyncio.sleep(0.05)

    def _on_event(self, type: str, pod: Manifest) -> None:
        metadata = pod["metadata"]
        if metadata.get("namespace") == self.namespace and MODEL_LABEL in metadata.get("labels", {}):
            others = [each for each in self._pods if each["metadata"]["name"] != metadata["name"]]
            found = others if type == "DELETED" else [*others, pod]
            self._pods = sorted(found, key=lambda each: str(each["metadata"]["name"]))

    async def _run_pods(self) -> None:
        for turn in itertools.count():
            with suppress(ApiError):
                if turn % 10 == 0:
                    await self._mount_tokens()
                for pod in self._pods:
                    await self._pretend(pod)
            await asyncio.sleep(0.05)

    async def _pretend(self, pod: Manifest) -> None:
        name = pod["metadata"]["name"]
        wanted = self.statuses.get(name)
        if wanted is None:
            if pod["status"]["phase"] != "Pending" or self.hold(name):
                return
            wanted = running_status(pod)
        live = pod["status"]
        if any(live.get(field) != value for field, value in wanted.items()):
            path = POD.path(self.namespace, name, "status")
            await self.client.request("PATCH", path, {}, {"status": wanted}, "application/merge-patch+json")
