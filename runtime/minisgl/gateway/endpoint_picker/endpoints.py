"""Endpoints of models, as Gateways name them: IP address and port of each frontend."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from minisgl.gateway.backends import BackendError
from minisgl.gateway.cluster_access import ClusterAccess
from minisgl.gateway.models import Address, Metadata, Model
from minisgl.gateway.upstream import Client
from minisgl.gateway.watch import Watch

_API: Final = "/apis/discovery.k8s.io/v1"
_RESOURCE: Final = "endpointslices"
_SELECTOR: Final = "app.kubernetes.io/name=minisgl,app.kubernetes.io/component=frontend"
"""Labels that a slice has from its Service."""
_SERVICE_LABEL: Final = "kubernetes.io/service-name"
_FRONTENDS: Final = "-frontend"
"""End of the name of the Service that always selects the frontends. That of the model may lead to the gateway."""
_PORT: Final = "http"


def endpoint(host: str, port: int) -> str:
    """Return `IP:PORT`, in one form for each address. Raises ValueError."""
    return Address(str(ipaddress.ip_address(host)), port).netloc


def parse_endpoint(text: str) -> str | None:
    """Return what `endpoint` returns for the same address; None: the text is no `IP:PORT`."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 65536:
        return None
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        return endpoint(host[1:-1] if bracketed else host, int(port))
    except ValueError:
        return None


def check_backends(addresses: Sequence[Address]) -> None:
    """Raises BackendError for a server that no Gateway can be led to."""
    for address in addresses:
        try:
            endpoint(*address)
        except ValueError:
            message = f"--backend http://{address.host}:{address.port} needs an IP address with --endpoint-picker-port"
            raise BackendError("invalid_backend", message) from None


def of_backends(model: Model) -> list[str]:
    """Return the endpoints of a model of given servers."""
    return [endpoint(*address) for address in model.addresses] if model.state == "ready" else []


class _Metadata(Metadata, rename="camel"):
    labels: dict[str, str] = msgspec.field(default_factory=dict)


class _Conditions(msgspec.Struct):
    ready: bool | None = None


class _Endpoint(msgspec.Struct):
    addresses: list[str] = []
    conditions: _Conditions = msgspec.field(default_factory=_Conditions)


class _Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class EndpointSlice(msgspec.Struct):
    """An EndpointSlice, as far as the gateway needs it."""

    metadata: _Metadata
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


def of_slice(found: EndpointSlice) -> list[str]:
    """Return the ready endpoints of a slice. Pure."""
    ports = [each.port for each in found.ports or () if each.name == _PORT and each.port]
    if not ports:
        return []
    ready = [each for each in found.endpoints or () if each.conditions.ready is not False and each.addresses]
    return [text for each in ready if (text := parse_endpoint(Address(each.addresses[0], ports[0]).netloc)) is not None]


class ClusterEndpoints:
    """Source of the ready frontends of models in the gateway's namespace, from the EndpointSlices of their Services. An
    InferencePool has its pods and its picker in its own namespace."""

    def __init__(self, client: Client, access: ClusterAccess) -> None:
        self._namespace = access.namespace
        self._on_change: Callable[[], None] = lambda: None
        self._slices: dict[str, tuple[str, list[str]]] = {}
        """Name of a slice → its Service, and its endpoints."""
        self.problem = "the EndpointSlices of frontends have not been listed yet"
        """Why endpoints may be missing; empty: all are known."""
        self._watch = Watch(
            client,
            access,
            f"{_API}/namespaces/{access.namespace}/{_RESOURCE}",
            EndpointSlice,
            replace=self._replace,
            put=self._put,
            remove=self._remove,
            selector=_SELECTOR,
        )

    def on_change(self, call: Callable[[], None]) -> None:
        """Call this after each change."""
        self._on_change = call

    def serves(self, model: Model) -> bool:
        """Return whether a model may be in a pool that asks here."""
        return model.key.namespace == self._namespace

    def of(self, model: Model) -> list[str]:
        """Return the ready frontends of a model that it `serves`."""
        service = model.key.name + _FRONTENDS
        return [text for owner, endpoints in self._slices.values() if owner == service for text in endpoints]

    async def run(self) -> None:
        """Run until cancelled."""
        await self._watch.run()

    def _replace(self, found: list[EndpointSlice]) -> None:
        self._slices.clear()
        for each in found:
            self._take(each)
        self.problem = ""
        self._on_change()

    def _put(self, found: EndpointSlice) -> None:
        self._take(found)
        self._on_change()

    def _remove(self, metadata: Metadata) -> None:
        self._slices.pop(metadata.name, None)
        self._on_change()

    def _take(self, found: EndpointSlice) -> None:
        self._slices[found.metadata.name] = found.metadata.labels.get(_SERVICE_LABEL, ""), of_slice(found)
