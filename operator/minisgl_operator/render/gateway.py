"""What leads the clients of a model without frontends to the cluster's gateway, and whether frontends believe it."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address
from typing import Final

from minisgl.wire.status import HTTP_PORT
from minisgl_operator.api.defaults import Defaults
from minisgl_operator.api.objects import Manifest, Ref
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.render import names
from minisgl_operator.render.child import child

_SERVICE_LABEL: Final = "kubernetes.io/service-name"


def is_heard_of(model: InferenceModel, defaults: Defaults) -> bool:
    """True if frontends may believe who is named to them as the gateway: nobody but the operator reaches their control
    port. A mesh may carry connections to it that a NetworkPolicy cannot tell from those to the API."""
    return defaults.gateway is not None and model.spec.network_policy.enabled and not model.spec.frontend.mesh


def slice_ref(model: str) -> Ref:
    return Ref("EndpointSlice", names.gateway(model))


def endpoint_slice(model: InferenceModel, addresses: Iterable[str]) -> Manifest:
    """Additional endpoints of the model's Service: the gateway's pods.

    A selector sees only pods of its own namespace. Nor may the Service lose its selector meanwhile: Kubernetes would
    leave the addresses of its last frontends in place, which other pods get. So the Service stays as it is, and gets a
    second EndpointSlice, next to the one of the selected frontends.
    """
    found = list(addresses)
    family = "IPv6" if any(ip_address(each).version == 6 for each in found) else "IPv4"
    labels = {_SERVICE_LABEL: model.name, names.SLICE_MANAGER_LABEL: names.MANAGED_BY}
    body = {
        "addressType": family,
        "endpoints": [{"addresses": [each], "conditions": {"ready": True}} for each in found],
        "ports": [{"name": "http", "port": HTTP_PORT, "protocol": "TCP"}],
    }
    name = slice_ref(model.name).name
    return child(model, "discovery.k8s.io/v1", "EndpointSlice", name, names.FRONTEND, body, labels=labels)
