"""The observed state of one model: data from the watches, the probes and the API server's responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

from minisgl.wire.gateway import GatewayStatus
from minisgl_operator.api.objects import Manifest, Ref

Report = Mapping[str, Any]
"""A response to GET /status, decoded."""

Readiness = Literal["True", "False", "Unknown"]
"""Status of a node's condition Ready. A live kubelet writes True or False; the node controller writes Unknown when the
kubelet is silent."""


@dataclass(frozen=True)
class NodeState:
    """Readiness and taints of a node that exists, as far as they decide about the pods that it has.

    `ready` is True for a node that has never reported. `not_ready_since`: time of the change to False or Unknown; None
    for a ready node. `out_of_service`: a user has tainted it with node.kubernetes.io/out-of-service. `emptied`: it
    takes no more pods, as while `kubectl drain` or a node autoscaler evicts those that it has.
    """

    ready: Readiness = "True"
    not_ready_since: datetime | None = None
    out_of_service: bool = False
    emptied: bool = False


Nodes = Mapping[str, NodeState]
"""Nodes by name. A node that is missing does not exist."""


@dataclass(frozen=True)
class Unreachable:
    """A probe without a usable response. `message` is for logs; conditions never repeat it. `while_starting`: the pod
    had not passed its startup probe then, so it need not have been listening."""

    message: str
    while_starting: bool = False


@dataclass(frozen=True)
class GatewayPod:
    """A pod of the gateway that has started.

    ready: new requests may be sent to it.
    status: its last answer; None without one.
    silent_since: time of the first poll without an answer after the last one with; None: it answers.
    """

    name: str
    address: str
    ready: bool = True
    status: GatewayStatus | None = None
    silent_since: datetime | None = None


@dataclass(frozen=True)
class ObjectEvent:
    """A core/v1 Event about one object."""

    reason: str
    message: str


@dataclass(frozen=True)
class Rejection:
    """A request that the API server rejected: HTTP status, `reason` and message of its response."""

    ref: Ref
    status: int
    reason: str
    message: str


@dataclass(frozen=True)
class DryRun:
    """The API server's response to the dry run of a pod of `revision`: HTTP status, 0 without a response; reason and
    message of an error."""

    revision: str
    status: int
    reason: str = ""
    message: str = ""


@dataclass(frozen=True)
class Observed:
    """One model and everything that belongs to it, at one moment.

    model_object: the InferenceModel as JSON.
    children: objects of the kinds in `resources.CHILDREN` with the model's labels, by kind and name, including those
        that are being deleted.
    conflicting: names of children that are taken by objects of other owners (controlled by another object, or without
        this model's labels), each with a text that names the owner. The operator never changes these objects.
    pods: pods with the model's labels (engine, frontend, fetch), as the API server has them, trim or not.
    reports: the last response to GET /status by pod uid; no entry for a pod without a probe so far.
    events: Events by the uid of their object, oldest first. Listed only for objects that wait: pods that are not
        ready, StatefulSets and Jobs that lack pods, the cache's PVC until it is bound.
    read_by_others: directories of the model's own cache that other models read as `source.pvc`; "" for all of it.
    gateway: pods of the cluster's gateway that have started; None if there is no gateway, or they are not known yet.
    nodes: nodes of the pods, without those that do not exist; None if the operator cannot read nodes.
    group: other models with the group of this model's route.
    routes_served: whether the cluster has HTTPRoutes of the Gateway API; None: not known yet.
    rejections: requests of the last plan that the API server rejected, or permissions that the operator lacks.
    dry_run: the response to the dry run of the last plan; None without one.
    """

    model_object: Manifest
    children: Mapping[Ref, Manifest] = field(default_factory=dict)
    conflicting: Mapping[Ref, str] = field(default_factory=dict)
    pods: tuple[Manifest, ...] = ()
    reports: Mapping[str, Report | Unreachable] = field(default_factory=dict)
    events: Mapping[str, tuple[ObjectEvent, ...]] = field(default_factory=dict)
    read_by_others: frozenset[str] = frozenset()
    gateway: tuple[GatewayPod, ...] | None = None
    nodes: Nodes | None = None
    group: tuple[Manifest, ...] = ()
    routes_served: bool | None = None
    rejections: tuple[Rejection, ...] = ()
    dry_run: DryRun | None = None

    def child(self, kind: str, name: str) -> Manifest | None:
        return self.children.get(Ref(kind, name))

    @cached_property
    def replica_statuses(self) -> Mapping[str, Mapping[str, Any]]:
        """`status.replicaStatuses` as they were last written, by the replica's name."""
        return by_replica(self.model_object.get("status") or {})

    def report(self, pod: Manifest) -> Report | None:
        """The pod's last report; None without one."""
        found = self.reports.get(pod["metadata"]["uid"])
        return None if isinstance(found, Unreachable) else found

    def was_probed(self, pod: Manifest) -> bool:
        """True if the pod was probed since it has passed its startup probe, or has answered before."""
        found = self.reports.get(pod["metadata"]["uid"])
        return found is not None and not (isinstance(found, Unreachable) and found.while_starting)

    def events_of(self, manifest: Manifest) -> tuple[ObjectEvent, ...]:
        """Events about the object, oldest first."""
        return self.events.get(manifest["metadata"]["uid"], ())


def by_replica(status: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The replicas of a status by their names, which are unique."""
    return {each["name"]: each for each in status.get("replicaStatuses") or ()}
