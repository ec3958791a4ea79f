"""Who may talk to whom: everything else is closed. Pods hold no API token and serve their ports without
authentication, so these policies are what guards them."""

from __future__ import annotations

from typing import Any, Final

from minisgl_operator.api.types import InferenceModel
from minisgl_operator.facts.observed import Manifest
from minisgl_operator.render import names
from minisgl_operator.render.child import child
from minisgl_operator.render.defaults import Defaults

_NAMESPACE_NAME_LABEL: Final = "kubernetes.io/metadata.name"
# 5353 is where the DNS pods of OpenShift listen: policies see the port behind the Service.
_DNS: Final = {
    "ports": [{"port": port, "protocol": protocol} for port in (53, 5353) for protocol in ("UDP", "TCP")],
}
_HTTPS: Final = 443


def engine_policy(model: InferenceModel, env: Defaults) -> Manifest:
    """Ranks reach each other on every port, for collectives pick theirs at random."""
    ranks = {"podSelector": {"matchLabels": names.selector(model.name, names.ENGINE)}}
    frontends = {"podSelector": {"matchLabels": names.selector(model.name, names.FRONTEND)}}
    ingress = [
        {"from": [ranks]},
        {"from": [frontends], "ports": _ports(names.SCHEDULER_PORT, names.CONTROL_PORT)},
        {"from": [_operator(env)], "ports": _ports(names.CONTROL_PORT)},
    ]
    return _policy(model, names.engine(model.name), names.ENGINE, ingress, [_DNS, {"to": [ranks]}])


def frontend_policy(model: InferenceModel, env: Defaults) -> Manifest:
    engines = {"podSelector": {"matchLabels": names.selector(model.name, names.ENGINE)}}
    peers = [peer.manifest() for peer in model.spec.network_policy.ingress_from] or [{"podSelector": {}}]
    ingress = [
        {"from": peers, "ports": _ports(names.HTTP_PORT)},
        {"from": [_operator(env)], "ports": _ports(names.CONTROL_PORT)},
    ]
    egress = [_DNS, {"to": [engines], "ports": _ports(names.SCHEDULER_PORT, names.CONTROL_PORT)}]
    return _policy(model, names.frontend(model.name), names.FRONTEND, ingress, egress)


def fetch_policy(model: InferenceModel, env: Defaults) -> Manifest:
    hub = model.spec.model.source.hugging_face
    assert hub is not None
    # A mirror inside the cluster listens on a port that the policy cannot know: that of the pod behind its Service.
    egress = [_DNS, {"ports": _ports(_HTTPS)}] if hub.endpoint is None else [{}]
    ingress = [{"from": [_operator(env)], "ports": _ports(names.CONTROL_PORT)}]
    return _policy(model, names.fetch(model.name), names.FETCH, ingress, egress)


def _policy(
    model: InferenceModel, name: str, component: str, ingress: list[dict[str, Any]], egress: list[dict[str, Any]]
) -> Manifest:
    spec = {
        "podSelector": {"matchLabels": names.selector(model.name, component)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": egress,
    }
    return child(model, "networking.k8s.io/v1", "NetworkPolicy", name, component, {"spec": spec})


def _operator(env: Defaults) -> dict[str, Any]:
    return {
        "namespaceSelector": {"matchLabels": {_NAMESPACE_NAME_LABEL: env.operator_namespace}},
        "podSelector": {"matchLabels": {names.NAME_LABEL: names.OPERATOR_APPLICATION}},
    }


def _ports(*ports: int) -> list[dict[str, Any]]:
    return [{"port": port, "protocol": "TCP"} for port in ports]
