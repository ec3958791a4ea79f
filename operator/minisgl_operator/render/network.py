"""NetworkPolicies of a model's pods; all other connections are denied. Pods have no API token and serve their ports
without authentication, so only these policies protect them."""

from __future__ import annotations

from typing import Any, Final

from minisgl_operator.api.defaults import Defaults
from minisgl_operator.api.objects import Manifest
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.render import names, remote_access, traces
from minisgl_operator.render.child import child
from minisgl_operator.render.pods import policy_ports
from minisgl_operator.render.route import gateway_namespaces

_NAMESPACE_NAME_LABEL: Final = "kubernetes.io/metadata.name"
# DNS pods of OpenShift listen on 5353: policies see the port behind the Service.
_DNS: Final = {
    "ports": [{"port": port, "protocol": protocol} for port in (53, 5353) for protocol in ("UDP", "TCP")],
}
_HTTPS: Final = {"port": 443, "protocol": "TCP"}
# Agent on the node with the credentials of EKS Pod Identity. Those of the node, at 169.254.169.254, stay out of reach.
_POD_IDENTITY: Final = {
    "to": [{"ipBlock": {"cidr": "169.254.170.23/32"}}, {"ipBlock": {"cidr": "fd00:ec2::23/128"}}],
    "ports": [{"port": 80, "protocol": "TCP"}],
}


def _tcp(*ports: int) -> list[dict[str, Any]]:
    return [{"port": port, "protocol": "TCP"} for port in ports]


# Ports at which proxies of a mesh accept what other proxies send: Istio's in ambient mode, and Linkerd's.
_MESH_INBOUND: Final = _tcp(15008, 4143)
# Control planes, in any namespace: istiod; identity, destination and policy of Linkerd.
_MESH_CONTROL: Final = {"to": [{"namespaceSelector": {}}], "ports": _tcp(15012, 8080, 8086, 8090)}
# Probes of the kubelet have this source in ambient mode.
_MESH_PROBES: Final = [
    {"ipBlock": {"cidr": "169.254.7.127/32"}},
    {"ipBlock": {"cidr": "fd16:9254:7127:1337:ffff:ffff:ffff:ffff/128"}},
]


def engine_policy(model: InferenceModel, defaults: Defaults) -> Manifest:
    """Ranks reach each other on every port, as collectives choose theirs at random."""
    ranks = _pods_of(model, names.ENGINE)
    frontends = {"from": [_pods_of(model, names.FRONTEND)], "ports": policy_ports("scheduler", "control")}
    return _policy(model, defaults, names.ENGINE, [{"from": [ranks]}, frontends], [_DNS, {"to": [ranks]}])


def frontend_policy(model: InferenceModel, defaults: Defaults) -> Manifest:
    default = defaults.models.network_policy
    clients_of_model = model.spec.network_policy.ingress_from or default.ingress_from
    peers = [peer.manifest() for peer in clients_of_model] or [{"podSelector": {}}]
    if default.monitoring_namespaces:
        peers.append(_pods_in(*default.monitoring_namespaces))
    if gateways := gateway_namespaces(model, defaults):
        peers.append(_pods_in(*gateways))
    if defaults.gateway is not None:
        peers.append(_pods_of_release(defaults, names.GATEWAY_APPLICATION))
    clients = {"from": peers, "ports": policy_ports("http")}
    engines = {"to": [_pods_of(model, names.ENGINE)], "ports": policy_ports("scheduler", "control")}
    egress: list[dict[str, Any]] = [_DNS, engines]
    if collector := traces.ports(defaults):
        egress.append({"ports": _tcp(*collector)})
    if not model.spec.frontend.mesh:
        return _policy(model, defaults, names.FRONTEND, [clients], egress)
    clients["ports"] = [*clients["ports"], *_MESH_INBOUND]
    probes = {"from": _MESH_PROBES, "ports": policy_ports("control")}
    return _policy(model, defaults, names.FRONTEND, [clients, probes], [*egress, _MESH_CONTROL])


def fetch_policy(model: InferenceModel, defaults: Defaults) -> Manifest:
    egress: list[dict[str, Any]] = [_DNS, {"ports": [_HTTPS]}]
    if remote_access.may_use_pod_identity(model):
        egress.append(_POD_IDENTITY)
    if remote_access.may_use_any_port(model, defaults):
        egress = [{}]
    return _policy(model, defaults, names.FETCH, [], egress)


def _policy(
    model: InferenceModel,
    defaults: Defaults,
    component: str,
    ingress: list[dict[str, Any]],
    egress: list[dict[str, Any]],
) -> Manifest:
    """Allows `ingress` and `egress`, and the operator's probes."""
    operator = _pods_of_release(defaults, names.OPERATOR_APPLICATION)
    spec = {
        **_pods_of(model, component),
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [*ingress, {"from": [operator], "ports": policy_ports("control")}],
        "egress": egress,
    }
    name = f"{model.name}-{component}"
    return child(model, "networking.k8s.io/v1", "NetworkPolicy", name, component, {"spec": spec})


def _pods_in(*namespaces: str) -> dict[str, Any]:
    """All pods of these namespaces, as a peer."""
    one_of = {"key": _NAMESPACE_NAME_LABEL, "operator": "In", "values": list(namespaces)}
    return {"namespaceSelector": {"matchExpressions": [one_of]}}


def _pods_of_release(defaults: Defaults, application: str) -> dict[str, Any]:
    """Pods of the operator's release, as a peer."""
    return {
        "namespaceSelector": {"matchLabels": {_NAMESPACE_NAME_LABEL: defaults.operator_namespace}},
        "podSelector": {"matchLabels": {names.NAME_LABEL: application}},
    }


def _pods_of(model: InferenceModel, component: str) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": names.selector(model.name, component)}}
