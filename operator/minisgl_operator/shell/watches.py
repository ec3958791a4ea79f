"""The watches, by kopf; the only file that knows it.

Only `on.event` is used: kopf's other handlers write annotations or finalizers to the objects. An event does no more
than to put the object into the store and its model into the queue.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import kopf

from minisgl_operator.shell.client import Connection, Object
from minisgl_operator.shell.controller import CHILD_SELECTOR
from minisgl_operator.shell.resources import MODEL, WATCHED, Resource

Saw = Callable[[str | None, Object], None]

# A service account's token is rotated; it is read again in time instead of after a refusal.
_CREDENTIALS: Final = timedelta(minutes=10)


async def watch(
    connection: Connection,
    namespaces: Sequence[str],
    saw: Saw,
    on_stop: Callable[[], Awaitable[None]],
) -> None:
    """Report every event to `saw` until cancelled, or until SIGTERM or SIGINT.

    Raises what broke a watch for good; the process is to be started again then. `on_stop` is awaited first of all at
    the end, because kopf waits for tasks that were started after it.
    """
    registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=registry)
    async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        configured(settings)

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await credentials(connection)

    @kopf.on.cleanup(registry=registry)
    async def cleanup(**_: Any) -> None:
        await on_stop()

    for resource in WATCHED:
        _register(registry, resource, saw)
    await kopf.operator(
        registry=registry,
        clusterwide=not namespaces,
        namespaces=namespaces,
        standalone=True,
    )


class NoDifferences(kopf.DiffBaseStorage):
    """What handlers of changes would compare an object with. There are none of them; kopf makes six deep copies of
    every object for them all the same, which was a third of what the operator computed."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        raise AssertionError("nothing is to be stored in objects")


def configured(settings: kopf.OperatorSettings) -> None:
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.persistence.diffbase_storage = NoDifferences()
    for resource in WATCHED:
        if resource != MODEL:
            settings.watching.label_selectors[resource.group, resource.version, resource.plural] = CHILD_SELECTOR
    settings.watching.chunk_size = 500
    settings.watching.server_timeout = 300
    settings.watching.reconnect_backoff = 1
    settings.networking.connect_timeout = 5
    settings.networking.request_timeout = 30
    settings.queueing.exit_timeout = 0.5
    # Before the kubelet's patience of 30 s ends.
    settings.process.ultimate_exiting_timeout = 25


async def credentials(connection: Connection) -> kopf.ConnectionInfo:
    """The same server and identity as the client's, so that there is one source of both."""
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


def _register(registry: kopf.OperatorRegistry, resource: Resource, saw: Saw) -> None:
    @kopf.on.event(resource.group, resource.version, resource.plural, registry=registry)
    async def handle(event: kopf.RawEvent, **_: Any) -> None:
        # Lists do not say what their items are.
        body: Object = {"apiVersion": resource.api_version, "kind": resource.kind, **event["object"]}
        saw(event["type"], body)
