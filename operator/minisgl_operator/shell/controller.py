"""The running operator without its watches: workers that reconcile, resync, probes, Events, health."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Final

from minisgl_operator.api.objects import Manifest
from minisgl_operator.facts.observed import Nodes, Rejection
from minisgl_operator.facts.pods import node_of
from minisgl_operator.facts.route import group_of
from minisgl_operator.shell import metrics
from minisgl_operator.shell.apply import Applier
from minisgl_operator.shell.client import ApiError, Client
from minisgl_operator.shell.config import Config
from minisgl_operator.shell.events import Recorder
from minisgl_operator.shell.gateways import Gateways, gateway_address
from minisgl_operator.shell.health import Health, LoopLag
from minisgl_operator.shell.nodes import NodeWatch
from minisgl_operator.shell.peer_tokens import PeerTokens
from minisgl_operator.shell.permissions import missing_permissions
from minisgl_operator.shell.pod_events import PodEvents
from minisgl_operator.shell.probe import Prober, pod_address
from minisgl_operator.shell.reconcile import Context, reconcile
from minisgl_operator.shell.resources import MODEL, WATCHED, Resource, selector
from minisgl_operator.shell.routes import Routes
from minisgl_operator.shell.store import Id, ModelKey, Store, object_id
from minisgl_operator.shell.upgrades import Upgrades
from minisgl_operator.shell.workqueue import WorkQueue
from minisgl_operator.shell.writes import Writes

_log = logging.getLogger(__name__)

# Most of them are for edited models, or in place of those that wait for something slow.
_WORKERS: Final = 16
_RECONCILE_TIMEOUT: Final = 60.0
_PERMISSIONS_SECONDS: Final = 10.0
_RESYNC_RETRY_SECONDS: Final = 5.0
_RELIST_SECONDS: Final = 5.0
# Together less than a Lease lasts that is no longer renewed.
_LAST_WRITES_SECONDS: Final = 3.0
_FLUSH_SECONDS: Final = 5.0
# A list of a large cluster takes long.
_RESYNC_GRACE: Final = 60.0


class Controller:
    """`start` returns when the watches may begin; `stop` cancels and awaits every task."""

    def __init__(
        self,
        client: Client,
        config: Config,
        identity: str,
        counts: metrics.Metrics,
        is_leader: Callable[[], bool] = lambda: True,
        address: Callable[[Manifest], str | None] = pod_address,
        on_restart: Callable[[], None] = lambda: None,
        address_of_gateway: Callable[[Manifest], str] = gateway_address,
    ) -> None:
        """`counts`: metrics that `client` reports its requests to. `address` returns the URL at which a pod is probed,
        and `address_of_gateway` that of a pod of the gateway.
        `on_restart` is called when the watches must begin again: when another namespace may be watched, or when the API
        server's database was restored."""
        self._client = client
        self._config = config
        self._counts = counts
        self._is_leader = is_leader
        self._on_restart = on_restart
        self.store = Store()
        self.queue: WorkQueue[ModelKey] = WorkQueue(lambda: client.server_is_busy)
        self._prober = Prober(
            *(self.store, self.queue.add, counts, config.probe_seconds, address),
            on_request=lambda key: self.queue.add(key, urgent=True),
            gateways=lambda: None if self._gateways is None else self._gateways.sources(),
        )
        self._nodes = NodeWatch(client, self._on_node_change)
        self._gateways = (
            None
            if config.defaults.gateway is None
            else Gateways(
                *(client, config.defaults.operator_namespace, config.defaults.gateway, config.probe_seconds),
                on_change=self._on_change,
                on_request=self._on_gateway_request,
                address=address_of_gateway,
            )
        )
        self._routes = Routes(
            *(client, self.store, lambda: self.namespaces, self._on_change),
            always=bool(config.defaults.models.route.parent_refs),
        )
        self._recorder = Recorder(client, identity)
        self._writes = Writes()
        self._context = Context(
            client=client,
            store=self.store,
            applier=Applier(client, self.store, counts, lambda key: self.queue.add(key, urgent=True)),
            prober=self._prober,
            nodes=self._nodes,
            gateways=self._gateways,
            routes=self._routes,
            pod_events=PodEvents(client),
            recorder=self._recorder,
            writes=self._writes,
            peer_tokens=PeerTokens(client),
            upgrades=Upgrades(config.defaults.models.rollout, self.store.models, self.queue.add),
            defaults=config.defaults,
        )
        self._lag = LoopLag()
        self._health = Health(self._health_problem, self._readiness_problem, self._page)
        self._missing: Mapping[str, tuple[Rejection, ...]] = {}
        self._listed_at: float | None = None
        self._waiting_for_lease = True
        self._resync_due = asyncio.Event()
        self._relist: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._events: asyncio.Task[None] | None = None
        self._fatal_error = ""

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The configured namespaces that may be watched; empty for the whole cluster."""
        return tuple(namespace for namespace in self._config.watch_namespaces if namespace not in self._missing)

    @property
    def nodes(self) -> Nodes | None:
        """All nodes; None if they cannot be read."""
        return self._nodes.nodes

    @property
    def idle(self) -> bool:
        """True if every model was reconciled since its last change, and all Events are written."""
        return self.queue.idle and self._recorder.idle

    async def serve_health(self) -> int:
        """Answer kubelet probes, also before the Lease is acquired; return the port."""
        self._spawn(self._lag.watch(), "loop lag")
        return await self._health.start(self._config.metrics_port)

    async def start(self) -> None:
        """Begin to work as the leader; return once everything was listed and may be watched. While a permission is
        missing everywhere this waits, and every model's status names the permission."""
        self._waiting_for_lease = False
        for number in range(_WORKERS):
            self._spawn(self._work(), f"worker {number}")
        self._events = self._new_task(self._recorder.run(), "events")
        await self._wait_for_permissions()
        self._spawn(self._nodes.run(), "nodes")
        await self._nodes.attempted.wait()
        if self._gateways is not None:
            self._spawn(self._gateways.run(), "gateways")
            await self._gateways.attempted.wait()
        self._spawn(self._routes.run(), "routes")
        await self._routes.attempted.wait()
        while not await self._list_everything():
            await asyncio.sleep(_RESYNC_RETRY_SECONDS)
        self._spawn(self._prober.run(), "probes")
        self._spawn(self._resync(), "resync")
        if self._missing:
            self._spawn(self._wait_for_more_permissions(), "permissions")

    async def stop(self) -> None:
        tasks, self._tasks = self._tasks, []
        await _cancel(tasks)
        await self._writes.finish(_LAST_WRITES_SECONDS)
        if self._events is not None:
            # The statuses that they report are written: the next operator sees no change.
            await self._recorder.flush(_FLUSH_SECONDS)
            await _cancel([self._events])
            self._events = None
        self.queue.close()
        if self._relist is not None:
            self._relist.cancel()
        await self._health.stop()

    def on_watch_event(self, type: str | None, body: Manifest) -> None:
        """`type` is ADDED, MODIFIED, DELETED, or None for an object of a list."""
        if type is None:
            self._schedule_relist()
        group = self._group(body)
        key = self.store.remove(body) if type == "DELETED" else self.store.put(body)
        for other in {*group, *self._group(body)}:
            self.queue.add(other)
        if key is not None:
            self.queue.add(key, urgent=type in ("ADDED", "MODIFIED") and _is_edited(body))

    def _group(self, body: Manifest) -> list[ModelKey]:
        """Models whose routes depend on this one, as it is stored; none for another object."""
        namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
        stored = self.store.model(ModelKey(namespace, name)) if body["kind"] == MODEL.kind else None
        group = None if stored is None else group_of(stored.body)
        return [ModelKey(namespace, each["metadata"]["name"]) for each in self.store.group(namespace, group)]

    def _on_node_change(self, names: frozenset[str] | None) -> None:
        """Queue the models with pods on these nodes; None: on any node."""
        for key, pod in self.store.pods():
            if names is None or node_of(pod) in names:
                self.queue.add(key)

    def _on_change(self, key: ModelKey | None) -> None:
        """Queue a model, if it exists; None: all of them."""
        for each in self.store.models():
            if key in (None, each):
                self.queue.add(each)

    def _on_gateway_request(self, key: ModelKey) -> None:
        """Queue a model for which a request waits."""
        if self.store.model(key) is not None:
            self.queue.add(key, urgent=True)

    async def _work(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            key = await self.queue.get()
            blocked = self._missing_in(key.namespace)
            if not blocked and self._listed_at is None:
                # The store is incomplete while permissions are missing. The first full list adds every key again.
                self.queue.done(key)
                continue
            started = clock()
            result = "error"
            try:
                async with asyncio.timeout(_RECONCILE_TIMEOUT):
                    done = await reconcile(self._context, key, blocked, self._client.now())
                result = "requeue" if done.failed else "success"
                if done.failed:
                    self.queue.retry(key)
                else:
                    self.queue.forget(key)
                    if done.after is not None:
                        self.queue.add_after(key, done.after)
            except (ApiError, TimeoutError) as error:
                _log.warning("Reconcile of %s/%s failed; retrying: %s", *key, error or "timed out")
                self.queue.retry(key)
            except Exception:
                # A bug that one model triggers must not stop the others.
                self._context.upgrades.leave_out(key, self._client.now())
                _log.exception("Reconcile of %s/%s failed; retrying", *key)
                self.queue.retry(key)
            finally:
                self._counts.reconciled(result, clock() - started)
                self.queue.done(key)

    async def _wait_for_permissions(self) -> None:
        logged: object = None
        while True:
            try:
                self._missing = await missing_permissions(self._client, self._config.watch_namespaces)
            except ApiError as error:
                if error.message != logged:
                    _log.warning("Cannot check the operator's permissions; retrying: %s", error.message)
                logged = error.message
            else:
                if self._missing != logged:
                    for rejection in (each for rejections in self._missing.values() for each in rejections):
                        _log.error("Waiting for permissions: %s", rejection.message)
                logged = self._missing
                if not self._is_stalled:
                    return
                await self._list_without_permissions()
            await asyncio.sleep(_PERMISSIONS_SECONDS)

    async def _wait_for_more_permissions(self) -> None:
        while True:
            await self._list_without_permissions()
            await asyncio.sleep(_PERMISSIONS_SECONDS)
            with suppress(ApiError):
                missing = await missing_permissions(self._client, list(self._missing))
                if len(missing) < len(self._missing):
                    _log.warning("The operator may watch more namespaces than before")
                    self._on_restart()
                    return
                self._missing = missing

    async def _list_without_permissions(self) -> None:
        """List what can be listed in namespaces without permissions, so that every model's status names the missing
        ones. No watch reports these models, so this is repeated."""
        for namespace in self._missing:
            for resource in WATCHED:
                try:
                    await self._list(resource, namespace or None)
                except ApiError:
                    # The missing permission was logged already. Without models there is no status to write.
                    if resource == MODEL:
                        break
        for key in self.store.models():
            if self._missing_in(key.namespace):
                self.queue.add(key)

    def _schedule_relist(self) -> None:
        """A watch that begins with a new list does not report objects that were deleted before."""
        if self._relist is not None:
            self._relist.cancel()
        self._relist = asyncio.get_running_loop().call_later(_RELIST_SECONDS, self._resync_due.set)

    async def _resync(self) -> None:
        while True:
            # Jitter keeps several operators from listing at the same moment.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.resync_seconds * random.uniform(0.9, 1.1)):
                    await self._resync_due.wait()
            self._resync_due.clear()
            await self._list_everything()
            self._context.applier.forget()
            gc.collect()

    async def _list_everything(self) -> bool:
        """Make the store equal to the API server's lists and queue every model; False when a list failed.

        A watch misses deletions while it is broken, so this is repeated.
        """
        assert not self._is_stalled
        complete = True
        for resource in WATCHED:
            for namespace in self.namespaces or (None,):
                try:
                    await self._list(resource, namespace)
                except ApiError as error:
                    complete = False
                    _log.warning("Could not list %s: %s", resource.title, error.message)
        if complete:
            self._listed_at = asyncio.get_running_loop().time()
        # Before the first complete list, a model's own children could seem to be missing.
        if self._listed_at is not None:
            # Pods of a deleted model may be left.
            for key in {*self.store.models(), *(key for key, _ in self.store.pods())}:
                self.queue.add(key)
        return complete

    async def _list(self, resource: Resource, namespace: str | None) -> None:
        present: set[Id] = set()
        version, newest = "0", self.store.newest(resource)
        async for page in self._client.pages(resource, namespace, selector(resource)):
            version = page.resource_version
            if int(version) < newest:
                # Watches from a version that was undone report nothing until it is reached again.
                _log.error("The API server's database was restored: %s %s < %d", resource.title, version, newest)
                self.store.forget_versions(resource)
                newest = 0
                self._on_restart()
            for body in page.items:
                present.add(object_id(body))
                self.store.put(body)
        self.store.sweep(resource, present, namespace, version)

    def _spawn(self, coroutine: Coroutine[None, None, None], name: str) -> None:
        """Run a task until `stop`."""
        self._tasks.append(self._new_task(coroutine, name))

    def _new_task(self, coroutine: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        """Run a task, in which a mistake fails the health of the process."""
        task = asyncio.create_task(coroutine, name=name)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """A task ends with an error only through a bug; /healthz then fails, and a new process takes over."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fatal_error = f"{task.get_name()} ended: {error!r}"
            _log.error("%s", self._fatal_error, exc_info=error)

    def _health_problem(self) -> str:
        if reason := self._fatal_error or self._lag.reason():
            return reason
        if (running := self.queue.longest_running()) > 2 * _RECONCILE_TIMEOUT:
            return f"a reconcile has been running for {running:.0f} s"
        if (age := self._resync_age()) > 3 * self._config.resync_seconds + _RESYNC_GRACE:
            return f"the last full list is {age:.0f} s old"
        return ""

    @property
    def _is_stalled(self) -> bool:
        """True if no namespace may be watched."""
        return bool(self._missing) and not self.namespaces

    def _missing_in(self, namespace: str) -> tuple[Rejection, ...]:
        """Permissions that are missing in the namespace."""
        return self._missing.get(namespace) or self._missing.get("", ())

    def _readiness_problem(self) -> str:
        if self._is_stalled:
            return "; ".join(rejection.message for rejections in self._missing.values() for rejection in rejections)
        return "" if self._waiting_for_lease or self._listed_at is not None else "the first full list is not complete"

    def _resync_age(self) -> float:
        return 0.0 if self._listed_at is None else asyncio.get_running_loop().time() - self._listed_at

    def _page(self) -> str:
        return metrics.render(
            self._counts,
            self.queue,
            models=[stored.body for key in self.store.models() if (stored := self.store.model(key)) is not None],
            resync_age=self._resync_age(),
            loop_lag=self._lag.seconds,
            leader=self._is_leader(),
        )


def _is_edited(body: Manifest) -> bool:
    """True if this is a model whose status is older than its spec: a user may be waiting for it."""
    if body["kind"] != MODEL.kind:
        return False
    return bool(body.get("status", {}).get("observedGeneration") != body["metadata"]["generation"])


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait for their ends."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
