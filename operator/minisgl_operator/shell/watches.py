"""Watches of models, children and pods with kopf, which no other file imports.

Only `on.event` is used: kopf's other handlers write annotations or finalizers to the objects. The handler of an event
stores the object and queues its model.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

import kopf

from minisgl_operator.api.objects import Manifest
from minisgl_operator.shell.client import Connection
from minisgl_operator.shell.resources import WATCHED, Resource, selector

OnEvent = Callable[[str | None, Manifest], None]

_log = logging.getLogger(__name__)

# Without the permission or the CRD, the process waits for them at its next start.
_PERMANENT: Final = (403, 404)
_FIRST_RETRY_SECONDS: Final = 1.0
_LAST_RETRY_SECONDS: Final = 16.0
# Watches that have lasted longer were healthy, so the next error is a new one.
_HEALTHY_SECONDS: Final = 60.0
_END_SECONDS: Final = 3.0
_END_ATTEMPTS: Final = 5
# A service account's token is rotated; it is read again before it expires.
_CREDENTIALS: Final = timedelta(minutes=10)


class WatchesHang(Exception):
    """Watches cannot be ended, so only a new process can begin them again."""


async def watch(
    connection: Connection,
    namespaces: Sequence[str],
    on_event: OnEvent,
    on_start: Callable[[], None] = lambda: None,
) -> None:
    """Pass every event to `on_event` until cancelled.

    An error that breaks a watch, as of an API server that loses its database for a moment, ends all of them. They begin
    again with new lists, five times, with growing delays. Then the error is raised, as is one that waiting does not
    cure, and the process must restart. `on_start` is called whenever they have begun: kopf has installed its own
    handlers of signals by then, which would wait five seconds for tasks that were started after it.
    """
    clock = asyncio.get_running_loop().time
    delay = _FIRST_RETRY_SECONDS
    while True:
        began = clock()
        try:
            await _watch(connection, namespaces, on_event, on_start)
            return
        except Exception as error:
            if clock() - began > _HEALTHY_SECONDS:
                delay = _FIRST_RETRY_SECONDS
            permanent = isinstance(error, WatchesHang) or getattr(error, "status", None) in _PERMANENT
            if permanent or delay > _LAST_RETRY_SECONDS:
                raise
            _log.warning("A watch broke; all of them begin again in %g s: %s", delay, error)
        await asyncio.sleep(delay)
        delay *= 2


async def _watch(
    connection: Connection, namespaces: Sequence[str], on_event: OnEvent, on_start: Callable[[], None]
) -> None:
    registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=registry)
    async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        configured(settings)

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await credentials(connection)

    for resource in WATCHED:
        _register(registry, resource, on_event)
    ready, stop_flag = asyncio.Event(), _StopFlag()

    async def started() -> None:
        await ready.wait()
        on_start()

    # kopf cancels all tasks that began after it.
    helpers = [
        asyncio.create_task(started(), name="start of the watches"),
        asyncio.create_task(stop_flag.stopping.wait(), name="end of the watches"),
    ]
    running = asyncio.create_task(
        kopf.operator(
            registry=registry,
            clusterwide=not namespaces,
            namespaces=namespaces,
            standalone=True,
            ready_flag=ready,
            stop_flag=stop_flag,
        ),
        name="watches",
    )
    others = asyncio.all_tasks()
    try:
        await asyncio.wait((running, helpers[1]), return_when=asyncio.FIRST_COMPLETED)
        await _end(running, others)
    except asyncio.CancelledError:
        running.cancel()
        try:
            await _end(running, others)
        except WatchesHang as error:
            _log.warning("The operator stops without waiting longer: %s", error)
        raise
    finally:
        for helper in helpers:
            helper.cancel()
    await running


async def _end(running: asyncio.Task[None], others: set[asyncio.Task[Any]]) -> None:
    """Wait until kopf has stopped. It cancels each of its tasks once, and waits without limit for those that a lost
    connection made ignore that, so they are cancelled again. `others` are not kopf's.

    Raises:
        WatchesHang: they do not end even then.
    """
    for _ in range(_END_ATTEMPTS):
        if running.done() or (await asyncio.wait((running,), timeout=_END_SECONDS))[0]:
            return
        for task in asyncio.all_tasks() - others:
            task.cancel()
    raise WatchesHang(f"watches have not ended within {_END_ATTEMPTS * _END_SECONDS:g} s")


class _StopFlag(asyncio.Event):
    """Flag that is never set. kopf cancels who waits for it when it stops."""

    def __init__(self) -> None:
        super().__init__()
        self.stopping = asyncio.Event()

    async def wait(self) -> Literal[True]:
        try:
            return await super().wait()
        finally:
            self.stopping.set()


class NoDifferences(kopf.DiffBaseStorage):
    """Storage of the object that handlers of changes compare with. None are registered, but kopf would still make six
    deep copies of every object for them, a third of the operator's CPU time."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        raise AssertionError("nothing is stored in objects")


def configured(settings: kopf.OperatorSettings) -> None:
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.persistence.diffbase_storage = NoDifferences()
    for resource in WATCHED:
        if selected := selector(resource):
            settings.watching.label_selectors[resource.group, resource.version, resource.plural] = selected
    settings.watching.chunk_size = 500
    settings.watching.server_timeout = 300
    settings.watching.reconnect_backoff = 1
    settings.networking.connect_timeout = 5
    settings.networking.request_timeout = 30
    settings.queueing.exit_timeout = 0.5
    # kopf would kill the process this long after a watch broke, even if the next watches are healthy.
    settings.process.ultimate_exiting_timeout = None


async def credentials(connection: Connection) -> kopf.ConnectionInfo:
    """Address and credentials of the client's connection."""
    authorization = await connection.get_api_key_with_prefix("BearerToken")
    scheme, _, token = (authorization or "").partition(" ")
    return kopf.ConnectionInfo(
        server=connection.host,
        ca_path=connection.ssl_ca_cert,
        insecure=not connection.verify_ssl,
        scheme=scheme.capitalize() or None,
        token=token or None,
        certificate_path=connection.cert_file,
        private_key_path=connection.key_file,
        proxy_url=connection.proxy,
        expiration=datetime.now(UTC) + _CREDENTIALS,
    )


def _register(registry: kopf.OperatorRegistry, resource: Resource, on_event: OnEvent) -> None:
    @kopf.on.event(resource.group, resource.version, resource.plural, registry=registry)
    async def handle(event: kopf.RawEvent, **_: Any) -> None:
        # Items of a list have no kind.
        body: Manifest = {"apiVersion": resource.api_version, "kind": resource.kind, **event["object"]}
        on_event(event["type"], body)
