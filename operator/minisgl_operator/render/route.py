"""HTTPRoute of a model: by headers with a served name, and by a path with the model's name.

Each model has a route of its own. Gateways do not divide requests between routes, so that of the first model of a group
has the names of all its models, with their weights; the others have only their paths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from minisgl_operator.api.defaults import Defaults
from minisgl_operator.api.objects import Manifest, Ref
from minisgl_operator.api.route import ParentReference, Route
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.render import names
from minisgl_operator.render.child import child

_HEADERS: Final = ("X-Gateway-Model-Name", "X-Gateway-Base-Model-Name")
_API: Final = "/v1"


@dataclass(frozen=True)
class Member:
    """A model of a group. `weight`: its part of the requests; 0: none."""

    name: str
    served_names: tuple[str, ...]
    weight: int = 1


def route_ref(model: str) -> Ref:
    return Ref("HTTPRoute", model)


def parents(model: InferenceModel, defaults: Defaults) -> tuple[ParentReference, ...]:
    """Gateways that shall lead to the model; without any there is no route."""
    own = model.spec.route or Route()
    return (own.parent_refs or defaults.models.route.parent_refs) if own.enabled else ()


def gateway_namespaces(model: InferenceModel, defaults: Defaults) -> tuple[str, ...]:
    """Namespaces of these Gateways, whose pods connect to the frontends."""
    found = {parent.namespace or model.metadata.namespace for parent in parents(model, defaults)}
    return tuple(sorted(found))


def http_route(model: InferenceModel, defaults: Defaults, group: Sequence[Member]) -> Manifest:
    """The route. `group`: all models of the group in their order, or the model alone."""
    own = model.spec.route or Route()
    hostnames = own.hostnames or defaults.models.route.hostnames
    spec: dict[str, Any] = {"parentRefs": [parent.manifest() for parent in parents(model, defaults)]}
    if hostnames:
        spec["hostnames"] = list(hostnames)
    spec["rules"] = list(_rules(model, own.group, group))
    body = {"spec": spec}
    return child(model, "gateway.networking.k8s.io/v1", "HTTPRoute", route_ref(model.name).name, names.FRONTEND, body)


def _rules(model: InferenceModel, group: str | None, members: Sequence[Member]) -> Iterator[dict[str, Any]]:
    namespace = model.metadata.namespace
    if members[0].name == model.name:
        yield from _by_header(members)
        if group is not None:
            yield _by_path(f"/{namespace}/{group}{_API}", members)
    # The path of a group comes before that of a model with its name.
    if model.name != group:
        yield _by_path(f"/{namespace}/{model.name}{_API}", [Member(model.name, model.served_names)])


def _by_header(members: Sequence[Member]) -> Iterator[dict[str, Any]]:
    """A rule for each set of models that share names."""
    served: dict[tuple[Member, ...], list[str]] = {}
    for name in dict.fromkeys(name for member in members for name in member.served_names):
        those = tuple(member for member in members if name in member.served_names)
        served.setdefault(those, []).append(name)
    for those, shared in served.items():
        matches = [
            {
                "path": {"type": "PathPrefix", "value": _API},
                "headers": [{"type": "Exact", "name": header, "value": name}],
            }
            for name in shared
            for header in _HEADERS
        ]
        yield _rule(matches, those)


def _by_path(path: str, members: Sequence[Member]) -> dict[str, Any]:
    rewrite = {"path": {"type": "ReplacePrefixMatch", "replacePrefixMatch": _API}}
    matches = [{"path": {"type": "PathPrefix", "value": path}}]
    return _rule(matches, members) | {"filters": [{"type": "URLRewrite", "urlRewrite": rewrite}]}


def _rule(matches: list[dict[str, Any]], members: Sequence[Member]) -> dict[str, Any]:
    backends = [{"name": each.name, "port": names.SERVICE_PORT, "weight": each.weight} for each in members]
    # Long answers without `stream`. Some controllers end requests after 15 s by default.
    return {"matches": matches, "timeouts": {"request": "0s"}, "backendRefs": backends}
