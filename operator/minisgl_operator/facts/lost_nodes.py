"""Pods that were told to end and do not: their node is lost.

The API server keeps a pod until its kubelet says that it has ended, and a StatefulSet makes no other one of its name
before that. A node that died says nothing, so its replica would stay away until a person steps in. Two pods of one
name are harmless here: engines only read the model's files, and a launcher takes the pod that joined last. A node
that comes back ends its old pods by itself.

A fetch is not in here: it writes, and two writers of one directory could leave a model that is half of each.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final

from minisgl_operator.facts.observed import Manifest, utc
from minisgl_operator.facts.replicas import component
from minisgl_operator.render import names

PATIENCE: Final = timedelta(seconds=60)
"""A kubelet that lives has killed the pod when its time is over, and then has this long to tidy up and to say so."""
_SUSPICION: Final = PATIENCE / 2
"""A busy node is not to be called lost for a little delay."""
_WRITES_NOTHING: Final = (names.ENGINE, names.FRONTEND)


def overdue(pods: Iterable[Manifest], now: datetime) -> tuple[Manifest, ...]:
    """Those to be removed without their kubelet's word."""
    harmless = (pod for pod in pods if component(pod) in _WRITES_NOTHING)
    return tuple(pod for pod in harmless if (end := _deadline(pod)) is not None and now >= end + PATIENCE)


def seems_lost(pod: Manifest, now: datetime) -> bool:
    """Whether it is time to tell people."""
    end = _deadline(pod)
    return end is not None and now >= end + _SUSPICION


def _deadline(pod: Manifest) -> datetime | None:
    """When the pod's time to end is over, None for one that need not end. A deletion's timestamp lies in the future by
    the grace period."""
    stamp = pod["metadata"].get("deletionTimestamp")
    return None if stamp is None else utc(stamp)


def seconds_until_news(pods: Iterable[Manifest], now: datetime) -> float | None:
    """Until a pod is suspected to be on a lost node, or is to be removed: the next of these moments."""
    ends = [end for pod in pods if (end := _deadline(pod)) is not None]
    moments = [moment for end in ends for moment in (end + _SUSPICION, end + PATIENCE) if moment > now]
    return (min(moments) - now).total_seconds() if moments else None
