"""The group of a model's route, and what Gateways say about the route."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from minisgl_operator.api.objects import Manifest, is_deleting
from minisgl_operator.api.route import ParentReference
from minisgl_operator.api.types import InferenceModel, InvalidSpec
from minisgl_operator.facts.wanted import takes_requests
from minisgl_operator.render.route import Member

# Conditions of a parent that must be True for requests to reach the model.
_NEEDED = ("Accepted", "ResolvedRefs")


def group_of(model_object: Manifest) -> str | None:
    """The group of a model whose spec may be invalid."""
    route = (model_object.get("spec") or {}).get("route")
    found = route.get("group") if isinstance(route, dict) else None
    return found if isinstance(found, str) else None


def members(model: InferenceModel, model_object: Manifest, others: Iterable[Manifest]) -> tuple[Member, ...]:
    """The models of the group, the oldest first, so that a new one does not move the group's names to its route. One
    that takes no requests, as a suspended one, gets none. `others`: models of the group besides this one."""
    found = [(model_object, model)]
    for other in others:
        try:
            parsed = InferenceModel.parse(other)
        except InvalidSpec:
            continue
        if not is_deleting(other) and (parsed.spec.route is None or parsed.spec.route.enabled):
            found.append((other, parsed))
    found.sort(key=lambda each: (str(each[0]["metadata"].get("creationTimestamp") or ""), each[1].name))
    return tuple(
        Member(
            parsed.name,
            parsed.served_names,
            parsed.spec.route.weight if takes_requests(raw) and parsed.spec.route is not None else 0,
        )
        for raw, parsed in found
    )


@dataclass(frozen=True)
class Refusal:
    """A Gateway that does not lead requests to the model. `message` is the Gateway's."""

    gateway: str
    reason: str
    message: str


@dataclass(frozen=True)
class Acceptance:
    """What the Gateways of a route say about its current generation. `silent`: those that have said nothing."""

    refusals: tuple[Refusal, ...] = ()
    silent: tuple[str, ...] = ()


def acceptance_of(route: Manifest, parents: Iterable[ParentReference], namespace: str) -> Acceptance:
    """`namespace`: that of the route."""
    refusals: list[Refusal] = []
    silent: list[str] = []
    generation = int(route["metadata"].get("generation") or 0)
    for parent in parents:
        name = f"{parent.namespace or namespace}/{parent.name}"
        entries = [each for each in _entries(route) if _is_of(each.get("parentRef") or {}, parent, namespace)]
        conditions = [
            condition
            for entry in entries
            for condition in entry.get("conditions") or ()
            if condition.get("type") in _NEEDED and int(condition.get("observedGeneration") or 0) >= generation
        ]
        refused = [each for each in conditions if each.get("status") == "False"]
        if refused:
            reason, message = (str(refused[0].get(field) or "") for field in ("reason", "message"))
            refusals.append(Refusal(name, reason, message))
        elif not any(each.get("type") == "Accepted" and each.get("status") == "True" for each in conditions):
            silent.append(name)
    return Acceptance(tuple(refusals), tuple(silent))


def _entries(route: Manifest) -> list[Mapping[str, Any]]:
    """One entry for each Gateway and controller."""
    return list((route.get("status") or {}).get("parents") or ())


def _is_of(reference: Mapping[str, Any], parent: ParentReference, namespace: str) -> bool:
    return (
        reference.get("name") == parent.name
        and (reference.get("namespace") or namespace) == (parent.namespace or namespace)
        and reference.get("sectionName") == parent.section_name
        and reference.get("port") == parent.port
    )
