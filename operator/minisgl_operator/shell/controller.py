"""The running operator without its watches: workers that reconcile, the periodic full list, probes, events, health."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

from minisgl_operator.facts.observed import Manifest, Refusal
from minisgl_operator.render.names import MANAGED_BY, MANAGED_BY_LABEL
from minisgl_operator.shell import metrics
from minisgl_operator.shell import permissions as access
from minisgl_operator.shell.apply import Applier
from minisgl_operator.shell.client import ApiError, Client, Object
from minisgl_operator.shell.config import Config
from minisgl_operator.shell.events import Recorder
from minisgl_operator.shell.health import Health, LoopLag
from minisgl_operator.shell.pod_events import StuckEvents
from minisgl_operator.shell.probe import Prober, pod_address
from minisgl_operator.shell.reconcile import Shell, reconcile
from minisgl_operator.shell.resources import MODEL, WATCHED, Resource
from minisgl_operator.shell.store import Id, ModelKey, Store, identify
from minisgl_operator.shell.workqueue import WorkQueue

_log = logging.getLogger(__name__)

CHILD_SELECTOR: Final = f"{MANAGED_BY_LABEL}={MANAGED_BY}"
_WORKERS: Final = 16
_RECONCILE_TIMEOUT: Final = 60.0
_ACCESS_SECONDS: Final = 10.0
_RESYNC_RETRY_SECONDS: Final = 5.0
_RELIST_SECONDS: Final = 5.0
# A list of a large cluster takes its time.
_RESYNC_GRACE: Final = 60.0


class Controller:
    """`start` returns when the watches may begin; `stop` leaves no task behind."""

    def __init__(
        self,
        client: Client,
        config: Config,
        identity: str,
        counts: metrics.Metrics,
        leads: Callable[[], bool] = lambda: True,
        address: Callable[[Manifest], str | None] = pod_address,
        on_access: Callable[[], None] = lambda: None,
    ) -> None:
        """`counts` is what `client` reports its requests to. `address` tells where a pod is asked. `on_access` hears
        that another namespace may be watched by now: watches take it up only when they start."""
        self._client = client
        self._config = config
        self._counts = counts
        self._leads = leads
        self._on_access = on_access
        self.store = Store()
        self.queue: WorkQueue[ModelKey] = WorkQueue()
        self._prober = Prober(self.store, self.queue.add, counts, config.probe_seconds, address)
        self._recorder = Recorder(client, identity)
        self._shell = Shell(
            client=client,
            store=self.store,
            applier=Applier(client, self.store, counts, lambda key: self.queue.add(key, urgent=True)),
            prober=self._prober,
            stuck=StuckEvents(client),
            recorder=self._recorder,
            environment=config.environment,
        )
        self._lag = LoopLag()
        self._health = Health(self._unhealthy, self._unready, self._page)
        self._blocked: Mapping[str, tuple[Refusal, ...]] = {}
        self._listed: float | None = None
        self._standing_by = True
        self._resync_due = asyncio.Event()
        self._relisted: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._fault = ""

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Those to be watched, of the configured ones; none are named when it is the whole cluster."""
        return tuple(namespace for namespace in self._config.watch_namespaces if namespace not in self._blocked)

    @property
    def idle(self) -> bool:
        """Every model was looked at since its last change, and all Events are written."""
        return self.queue.idle and self._recorder.idle

    async def serve_health(self) -> int:
        """Answer the kubelet, before there is a Lease already; return the port."""
        self._spawn(self._lag.watch(), "loop lag")
        return await self._health.start(self._config.metrics_port)

    async def start(self) -> None:
        """Begin to work as the leader; return once everything was listed and may be watched. While a right is missing
        everywhere this waits, and every model's status says which one it is."""
        self._standing_by = False
        for number in range(_WORKERS):
            self._spawn(self._work(), f"worker {number}")
        self._spawn(self._recorder.run(), "events")
        await self._await_access()
        while not await self._list_everything():
            await asyncio.sleep(_RESYNC_RETRY_SECONDS)
        self._spawn(self._prober.run(), "probes")
        self._spawn(self._resync(), "resync")
        if self._blocked:
            self._spawn(self._await_more_access(), "access")

    async def stop(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.queue.close()
        if self._relisted is not None:
            self._relisted.cancel()
        await self._health.stop()

    def saw(self, kind: str | None, body: Object) -> None:
        """An event of a watch. `kind` is ADDED, MODIFIED, DELETED, or None for an object of a list."""
        if kind is None:
            self._list_soon()
        key = self.store.remove(body) if kind == "DELETED" else self.store.put(body)
        if key is not None:
            self.queue.add(key, urgent=kind in ("ADDED", "MODIFIED") and _is_edited(body))

    async def _work(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            key = await self.queue.get()
            blocked = self._refusals(key.namespace)
            if not blocked and self._listed is None:
                # What was seen while rights were missing is not all. The first full list adds every key again.
                self.queue.done(key)
                continue
            started = clock()
            result = "error"
            try:
                async with asyncio.timeout(_RECONCILE_TIMEOUT):
                    done = await reconcile(self._shell, key, blocked, datetime.now(UTC))
                result = "requeue" if done.failed else "success"
                if done.failed:
                    self.queue.retry(key)
                else:
                    self.queue.forget(key)
                    if done.after is not None:
                        self.queue.add_after(key, done.after)
            except (ApiError, TimeoutError) as error:
                _log.warning("Could not finish with %s/%s, tries again: %s", *key, error or "it took too long")
                self.queue.retry(key)
            except Exception:
                # A fault of ours in one model must not stop the others.
                _log.exception("Failed on %s/%s", *key)
                self.queue.retry(key)
            finally:
                self._counts.reconciled(result, clock() - started)
                self.queue.done(key)

    async def _await_access(self) -> None:
        said: object = None
        while True:
            try:
                self._blocked = await access.missing(self._client, self._config.watch_namespaces)
            except ApiError as error:
                if error.message != said:
                    _log.warning("Cannot ask for the operator's rights: %s", error.message)
                said = error.message
            else:
                news = self._blocked != said
                said = self._blocked
                for refusal in (each for refusals in self._blocked.values() for each in refusals if news):
                    _log.error("Waits: %s", refusal.message)
                if not self._stands_still:
                    return
                await self._list_blocked()
            await asyncio.sleep(_ACCESS_SECONDS)

    async def _await_more_access(self) -> None:
        while True:
            await self._list_blocked()
            await asyncio.sleep(_ACCESS_SECONDS)
            with suppress(ApiError):
                blocked = await access.missing(self._client, list(self._blocked))
                if len(blocked) < len(self._blocked):
                    _log.warning("May watch more namespaces than before")
                    self._on_access()
                    return
                self._blocked = blocked

    async def _list_blocked(self) -> None:
        """Where nothing may be done, see what may be seen and look at every model, so that its status says why. No
        watch tells of these models, so this has to happen again and again."""
        for namespace in self._blocked:
            for resource in WATCHED:
                try:
                    await self._list(resource, namespace or None)
                except ApiError:
                    # That rights are missing was said already. Without models there is no status to be written.
                    if resource == MODEL:
                        break
        for key in self.store.models():
            if self._refusals(key.namespace):
                self.queue.add(key)

    def _list_soon(self) -> None:
        """Once a watch has begun with a new list: what was deleted before that, it does not tell."""
        if self._relisted is not None:
            self._relisted.cancel()
        self._relisted = asyncio.get_running_loop().call_later(_RELIST_SECONDS, self._resync_due.set)

    async def _resync(self) -> None:
        while True:
            # Jitter keeps several operators from listing at the same moment for ever.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.resync_seconds * random.uniform(0.9, 1.1)):
                    await self._resync_due.wait()
            self._resync_due.clear()
            await self._list_everything()
            self._shell.applier.forget()

    async def _list_everything(self) -> bool:
        """Make the store equal to the API server's lists and look at every model; False when a list failed.

        A watch loses what is deleted while it is broken, so this has to happen again and again.
        """
        assert not self._stands_still
        complete = True
        for resource in WATCHED:
            for namespace in self.namespaces or (None,):
                try:
                    await self._list(resource, namespace)
                except ApiError as error:
                    complete = False
                    _log.warning("Could not list %s: %s", resource.title, error.message)
        if complete:
            self._listed = asyncio.get_running_loop().time()
        # Before everything was seen once, a model's own children could be taken for missing.
        if self._listed is not None:
            # Of a model that has gone pods may be left.
            for key in {*self.store.models(), *(key for key, _ in self.store.pods())}:
                self.queue.add(key)
        return complete

    async def _list(self, resource: Resource, namespace: str | None) -> None:
        selector = "" if resource == MODEL else CHILD_SELECTOR
        present: set[Id] = set()
        version = "0"
        async for page in self._client.pages(resource, namespace, selector):
            version = page.resource_version
            for body in page.items:
                present.add(identify(body))
                self.store.put(body)
        self.store.sweep(resource, present, namespace, version)

    def _spawn(self, coroutine: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(coroutine, name=name)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Only a fault of ours ends one with an error. What it did is not done any more: a new process does it."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault = f"{task.get_name()} ended: {error!r}"
            _log.error("%s", self._fault, exc_info=error)

    def _unhealthy(self) -> str:
        if reason := self._fault or self._lag.reason():
            return reason
        if (running := self.queue.longest_running()) > 2 * _RECONCILE_TIMEOUT:
            return f"a reconcile has been running for {running:.0f} s"
        if (age := self._resync_age()) > 3 * self._config.resync_seconds + _RESYNC_GRACE:
            return f"the last full list is {age:.0f} s old"
        return ""

    @property
    def _stands_still(self) -> bool:
        """Nothing may be watched so far."""
        return bool(self._blocked) and not self.namespaces

    def _refusals(self, namespace: str) -> tuple[Refusal, ...]:
        """Why nothing may be done there now."""
        return self._blocked.get(namespace) or self._blocked.get("", ())

    def _unready(self) -> str:
        if self._stands_still:
            return "; ".join(refusal.message for refusals in self._blocked.values() for refusal in refusals)
        return "" if self._standing_by or self._listed is not None else "the first full list is not complete"

    def _resync_age(self) -> float:
        return 0.0 if self._listed is None else asyncio.get_running_loop().time() - self._listed

    def _page(self) -> str:
        now = metrics.Snapshot(
            depth=self.queue.depth,
            adds=self.queue.adds,
            retries=self.queue.retries,
            longest_running=self.queue.longest_running(),
            resync_age=self._resync_age(),
            loop_lag=self._lag.seconds,
            leader=self._leads(),
            models=len(self.store.models()),
        )
        return metrics.render(self._counts, now)


def _is_edited(body: Object) -> bool:
    """Whether this is a model whose status does not speak of its present spec: somebody may be waiting for it."""
    if body["kind"] != MODEL.kind:
        return False
    return bool(body.get("status", {}).get("observedGeneration") != body["metadata"]["generation"])
