"""Whether a rollout adds a replica first, with the strategy Auto."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final, Literal

from minisgl_operator.api.objects import is_deleting, parse_time
from minisgl_operator.facts.pods import node_of
from minisgl_operator.facts.replicas import Replica

Strategy = Literal["Surge", "Recreate", "NoRoom"]
"""NoRoom: as Recreate, because an additional replica did not get nodes for its pods in time."""

SURGE_TIMEOUT: Final = timedelta(seconds=60)
"""Time in which all pods of an additional replica must get a node."""


def auto_strategy(replicas: Iterable[Replica], now: datetime) -> Strategy:
    """Surge as long as each additional replica gets nodes in time."""
    replicas = tuple(replicas)
    ends = (_end(replica) for replica in replicas if any(each.has_old_template for each in replicas))
    return "NoRoom" if any(end is not None and end <= now for end in ends) else "Surge"


def surge_end(replicas: Iterable[Replica], now: datetime) -> datetime | None:
    """Time at which an additional replica has waited too long; None if none waits, or one already has."""
    end = min((end for replica in replicas if (end := _end(replica)) is not None), default=None)
    return None if end is None or end <= now else end


def _end(replica: Replica) -> datetime | None:
    """The time until which a new replica that lacks nodes may wait; None for another one. If the API server refuses its
    pods, it would also refuse them in the place of an old replica."""
    live = replica.stateful_set
    if live is None or is_deleting(live) or replica.has_old_template:
        return None
    if replica.pods_refused:
        return None
    if replica.size and sum(bool(node_of(pod)) for pod in replica.pods) >= replica.size:
        return None
    return parse_time(live["metadata"]["creationTimestamp"]) + SURGE_TIMEOUT
