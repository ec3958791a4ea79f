"""What the operator has seen of one model: plain data from the watches and the probes. Nothing here is a wish."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

Manifest = dict[str, Any]
"""One Kubernetes object as JSON."""


@dataclass(frozen=True, order=True)
class Ref:
    """A child of a model. Its namespace is the model's."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def ref_of(manifest: Manifest) -> Ref:
    return Ref(manifest["kind"], manifest["metadata"]["name"])


def controller_uid(manifest: Manifest) -> str | None:
    """The uid of the object that controls this one, None when nothing does."""
    for owner in manifest["metadata"].get("ownerReferences") or ():
        if owner.get("controller"):
            return str(owner["uid"])
    return None


@dataclass(frozen=True)
class Unreachable:
    """A probe that got no usable answer. `message` is for logs: a condition never repeats it."""

    message: str


@dataclass(frozen=True)
class ObjectEvent:
    """A core/v1 Event about one object."""

    reason: str
    message: str


@dataclass(frozen=True)
class Observed:
    """One model and all that belongs to it, at one moment.

    children: objects of the kinds in `resources.CHILDREN` that carry the model's labels, by kind and name. An object
        that is being deleted is still in here.
    foreign: names of children that objects of someone else hold (no controller owner of ours, not our labels), with
        a short text that says whose. They are never touched.
    pods: pods that carry the model's labels (engine, frontend, fetch), as the API server has them, trimmed or not.
    reports: by pod uid the last answer to GET /status, decoded; a pod that was never asked has no entry.
    events: by the uid of the object that they are about, oldest first. Asked for only when something waits: pods
        that are not ready, StatefulSets and Jobs that lack pods, the cache's claim while it is unbound.
    """

    raw: Manifest
    children: Mapping[Ref, Manifest] = field(default_factory=dict)
    foreign: Mapping[Ref, str] = field(default_factory=dict)
    pods: tuple[Manifest, ...] = ()
    reports: Mapping[str, Mapping[str, Any] | Unreachable] = field(default_factory=dict)
    events: Mapping[str, tuple[ObjectEvent, ...]] = field(default_factory=dict)

    def child(self, kind: str, name: str) -> Manifest | None:
        return self.children.get(Ref(kind, name))

    def report(self, pod: Manifest) -> Mapping[str, Any] | None:
        """The pod's last answer; None when it gave none."""
        found = self.reports.get(pod["metadata"]["uid"])
        return None if isinstance(found, Unreachable) else found


@dataclass(frozen=True)
class Refusal:
    """A step that the API server refused: HTTP status, its `reason` and its message."""

    ref: Ref
    status: int
    reason: str
    message: str


@dataclass(frozen=True)
class Outcome:
    """What came of the last plan's steps. Steps that went well are seen in `Observed` instead."""

    refusals: tuple[Refusal, ...] = ()


def utc(text: str) -> datetime:
    """A Kubernetes timestamp."""
    return datetime.fromisoformat(text)
