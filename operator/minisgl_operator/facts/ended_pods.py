"""Pods that a node has refused or ended: for want of devices or memory, or because it shuts down.

A StatefulSet replaces such a pod within a second, and the next one may end in the same way. The status of the replica
keeps the end of the last one until a container of its successor runs: otherwise each condition would change with every
attempt, and nobody would find the cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from minisgl_operator.api.objects import Manifest
from minisgl_operator.api.text import quote
from minisgl_operator.facts.pods import component, containers_run, is_ended_by_node, node_of, revision_of
from minisgl_operator.render import names


@dataclass(frozen=True)
class EndedPod:
    """`component` and `name` are the pod's. `reason` is the kubelet's as one word, `message` its text. `at`: time of
    the end, as far as the pod shows it, in RFC 3339."""

    component: str
    name: str
    node: str
    reason: str
    message: str
    at: str


def ended_pod(pod: Manifest) -> EndedPod | None:
    """The end of a pod by its node; None for any other pod."""
    if not is_ended_by_node(pod):
        return None
    metadata, status = pod["metadata"], pod["status"]
    return EndedPod(
        component=component(pod) or "",
        name=str(metadata["name"]),
        node=str(node_of(pod) or ""),
        reason=str(status["reason"]),
        message=quote(str(status.get("message") or "")),
        at=str(status.get("startTime") or metadata["creationTimestamp"]),
    )


def ended_pod_of_replica(
    name: str, revision: str | None, pods: Iterable[Manifest], status: Mapping[str, Any]
) -> EndedPod | None:
    """The pod of a replica that a node ended last, until a container of its successor runs; None without one. `pods`
    are those that exist, `revision` is the replica's, and `status` the last status of the model."""
    pods = tuple(pods)
    for pod in pods:
        if revision_of(pod) == revision and (found := ended_pod(pod)) is not None:
            return found
    if revision is None or any(map(containers_run, pods)):
        return None
    for each in status.get("replicaStatuses") or ():
        failure = each.get("lastFailure") or {}
        if each.get("name") == name and each.get("revision") == revision and failure.get("node"):
            return EndedPod(
                component=names.ENGINE,
                name=str(failure.get("pod") or ""),
                node=str(failure["node"]),
                reason=str(failure.get("reason") or ""),
                message=quote(str(failure.get("message") or "")),
                at=str(failure.get("at") or ""),
            )
    return None
