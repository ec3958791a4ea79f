"""Deleted pods that do not terminate: because their node is lost, although it lives, or for a finalizer.

The API server keeps a pod until its kubelet reports that it has terminated, and a StatefulSet creates no other pod of
that name before. A node that is down reports nothing, so its replica would stay down until a user acts. Such a pod is
deleted by force, but only when its node is known to be lost: a node that lives and does not end a pod has a process
that hangs in its driver or on its disk, or a container runtime that hangs. Without the pod its kubelet would forget the
devices of that process, and the next pod would get a GPU in use. A node that reports that it is not ready lives.

A finalizer keeps a pod whatever its node does. It is read first: a pod that has ended is no fault of its node.

A second pod of the same name elsewhere damages no data: engines only read the model's files, and a leader takes the pod
that joined last. Fetch pods are never deleted by force: two writers of one directory could leave a mixture of two
models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import Final, Literal

from minisgl_operator.api.objects import Manifest, parse_time
from minisgl_operator.facts.observed import Nodes, NodeState
from minisgl_operator.facts.pods import component, node_of
from minisgl_operator.render import names

NODE_LOST_AFTER: Final = timedelta(seconds=300)
"""Time for which a node's Ready must have been Unknown. Kubernetes sets it 50 s after the last heartbeat
(node-monitor-grace-period), and waits as long as this before it evicts the node's pods (the default tolerations of
not-ready and unreachable)."""
FORCE_DELETE_AFTER: Final = timedelta(seconds=60)
"""Time after the deletion in which a node that returns reports the pod's end; the same time after the grace period of a
pod on a live node, in which its kubelet cleans up. Kubernetes' garbage collection of pods without a node takes about as
long (40 s of quarantine, a check every 20 s). With default tolerations a pod is deleted by force 6 minutes after its
node's Ready became Unknown, which is also when Kubernetes detaches the volumes of such a node."""
_READ_ONLY: Final = (names.ENGINE, names.FRONTEND)

Ending = Literal["finalizer", "lost", "silent", "not ready", "hangs", "unknown"]
"""State of a deleted pod that does not terminate. `finalizer`: its node has nothing to do with it any more, and a
finalizer keeps it. `lost`: its node is lost; the pod is deleted by force, a fetch pod
excepted. `silent`: its node's kubelet is silent, but not for long enough. `hangs`: its node is ready, and has not ended
the pod in time. `not ready`: as `hangs`, but the kubelet reports that the node is not ready. `unknown`: as `hangs`, but
the operator cannot read nodes."""


def pods_to_force_delete(pods: Iterable[Manifest], nodes: Nodes | None, now: datetime) -> tuple[Manifest, ...]:
    """Pods to delete without confirmation of their kubelet. A lost node drains nothing, so their grace period does not
    count. None without `nodes`."""
    return tuple(
        pod
        for pod in pods
        if component(pod) in _READ_ONLY
        and not is_kept_by_finalizer(pod)
        and (deleted := _deleted_at(pod)) is not None
        and now >= deleted + FORCE_DELETE_AFTER
        and ending(pod, nodes, now) == "lost"
    )


def ending(pod: Manifest, nodes: Nodes | None, now: datetime) -> Ending | None:
    """Reason why a deleted pod has not terminated; None for a pod that is not deleted, or whose kubelet has time left.
    `nodes` is None when the operator cannot read nodes."""
    deadline, node = _deadline(pod), node_of(pod)
    if deadline is not None and is_kept_by_finalizer(pod):
        return "finalizer" if now >= deadline + FORCE_DELETE_AFTER else None
    if deadline is None or node is None:
        return None
    state = None if nodes is None else nodes.get(node)
    if nodes is not None and is_lost(state, now):
        return "lost"
    if state is not None and state.ready == "Unknown":
        return "silent"
    if now < deadline + FORCE_DELETE_AFTER:
        return None
    if state is None:
        return "unknown"
    return "hangs" if state.ready == "True" else "not ready"


def finalizers(pod: Manifest) -> tuple[str, ...]:
    return tuple(pod["metadata"].get("finalizers") or ())


def is_kept_by_finalizer(pod: Manifest) -> bool:
    """True if only its finalizers keep a deleted pod: its kubelet has reported its end, or none has to confirm it."""
    ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    return bool(finalizers(pod)) and (ended or pod["metadata"].get("deletionGracePeriodSeconds") == 0)


def is_lost(node: NodeState | None, now: datetime) -> bool:
    """True for a node that does not exist, that is tainted as out of service and is not ready, or whose kubelet has
    been silent for long."""
    # A node that is ready runs, whatever its taints say. Kubernetes does not force pods off it either.
    if node is None or (node.out_of_service and node.ready != "True"):
        return True
    silent_since = _silent_since(node)
    return silent_since is not None and now >= silent_since + NODE_LOST_AFTER


def _silent_since(node: NodeState) -> datetime | None:
    return node.not_ready_since if node.ready == "Unknown" else None


def next_ending(pods: Iterable[Manifest], nodes: Nodes | None, now: datetime) -> datetime | None:
    """Time at which a deleted pod's `ending` changes without an event, or it may be deleted by force; None if neither
    happens."""
    found = (_next_ending(pod, nodes, now) for pod in pods)
    return min((each for each in found if each is not None), default=None)


def _next_ending(pod: Manifest, nodes: Nodes | None, now: datetime) -> datetime | None:
    def state(at: datetime) -> object:
        return ending(pod, nodes, at), bool(pods_to_force_delete([pod], nodes, at))

    coming = sorted(moment for moment in _moments(pod, nodes) if moment > now)
    return next((moment for moment in coming if state(moment) != state(now)), None)


def _moments(pod: Manifest, nodes: Nodes | None) -> Iterator[datetime]:
    deleted, deadline = _deleted_at(pod), _deadline(pod)
    if deleted is None or deadline is None:
        return
    yield deleted + FORCE_DELETE_AFTER
    yield deadline + FORCE_DELETE_AFTER
    state = (nodes or {}).get(node_of(pod) or "")
    if state is not None and (silent_since := _silent_since(state)) is not None:
        yield silent_since + NODE_LOST_AFTER


def _deadline(pod: Manifest) -> datetime | None:
    """The end of the pod's grace period, which is its deletionTimestamp; None for a pod that is not deleted."""
    stamp = pod["metadata"].get("deletionTimestamp")
    return None if stamp is None else parse_time(stamp)


def _deleted_at(pod: Manifest) -> datetime | None:
    """The time of the deletion."""
    deadline = _deadline(pod)
    grace = timedelta(seconds=pod["metadata"].get("deletionGracePeriodSeconds") or 0)
    return None if deadline is None else deadline - grace
