"""Deleted pods that do not terminate because their node is lost.

The API server keeps a pod until its kubelet reports that it has terminated, and a StatefulSet creates no other pod of
that name before. A node that is down reports nothing, so without force its replica would stay down until a user acts.
Two pods of one name are harmless here: engines only read the model's files, and a leader takes the pod that joined
last. A node that comes back terminates its old pods.

Fetch pods are never deleted by force: two writers of one directory could leave a mixture of two models.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final

from minisgl_operator.api.objects import Manifest, parse_time
from minisgl_operator.facts.pods import component
from minisgl_operator.render import names

FORCE_DELETE_AFTER: Final = timedelta(seconds=60)
"""Time after the grace period in which a living kubelet, which has killed the pod, cleans up and reports it."""
_SUSPECT_AFTER: Final = FORCE_DELETE_AFTER / 2
"""A short delay of a busy node is not reported as a lost node."""
_READ_ONLY: Final = (names.ENGINE, names.FRONTEND)


def pods_to_force_delete(pods: Iterable[Manifest], now: datetime) -> tuple[Manifest, ...]:
    """Pods to delete without confirmation of their kubelet."""
    read_only = (pod for pod in pods if component(pod) in _READ_ONLY)
    return tuple(pod for pod in read_only if (end := _deadline(pod)) is not None and now >= end + FORCE_DELETE_AFTER)


def on_lost_node(pod: Manifest, now: datetime) -> bool:
    """True if the pod's grace period ended long enough ago to report its node as lost."""
    end = _deadline(pod)
    return end is not None and now >= end + _SUSPECT_AFTER


def _deadline(pod: Manifest) -> datetime | None:
    """The end of the pod's grace period, which is its deletionTimestamp; None for a pod that is not deleted."""
    stamp = pod["metadata"].get("deletionTimestamp")
    return None if stamp is None else parse_time(stamp)


def seconds_until_next_deadline(pods: Iterable[Manifest], now: datetime) -> float | None:
    """Seconds until the next pod counts as being on a lost node, or is to be deleted by force."""
    ends = [end for pod in pods if (end := _deadline(pod)) is not None]
    moments = [moment for end in ends for moment in (end + _SUSPECT_AFTER, end + FORCE_DELETE_AFTER) if moment > now]
    return (min(moments) - now).total_seconds() if moments else None
