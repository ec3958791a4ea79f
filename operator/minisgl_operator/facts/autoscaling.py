"""The autoscaler: the number of replicas that the observed load asks for. Pure.

More replicas are added at once, also while a part of the load is unknown: the known part is a lower bound. Replicas are
removed only when fewer have sufficed for `scaleDownDelaySeconds` without interruption, and then down to the largest
number that was needed in that time. An unknown load interrupts it, as after a restart of the operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from math import ceil
from typing import Final

from minisgl_operator.api.autoscaling import Autoscaling

_TOLERANCE: Final = 0.1
"""Relative difference from the target that changes nothing."""
_LOW_QUEUE_TIME: Final = 0.5
"""Queue times below this part of the target ask for one replica less: they say nothing about how many suffice."""
_LOOK_AGAIN: Final = timedelta(seconds=15)
_SOON: Final = timedelta(seconds=1)


@dataclass(frozen=True)
class ReplicaLoad:
    """Load of one replica that gets requests. `requests`: those that run or wait. `queue_ms`: mean time for which
    requests waited. `kv_usage`: part of the KV cache in use, from 0 to 1. None: unknown."""

    requests: int
    queue_ms: float | None = None
    kv_usage: float | None = None


@dataclass(frozen=True)
class Load:
    """Load of a model at one moment.

    held: requests that wait because no replica gets requests.
    replicas: those that frontends send requests to.
    idle_seconds: time since the last request that any frontend had; None if one does not report it.
    complete: every frontend reports.
    """

    held: int = 0
    replicas: tuple[ReplicaLoad, ...] = ()
    idle_seconds: float | None = None
    complete: bool = False


@dataclass(frozen=True)
class Decision:
    """`target`: number of replicas. `fewer`: number that has sufficed since `fewer_since`, if less; None: none does."""

    target: int
    fewer: int | None = None
    fewer_since: datetime | None = None


def decide(settings: Autoscaling, previous: Decision, load: Load, now: datetime) -> Decision:
    """The next decision. `previous` is the last one; its target may violate limits that were edited since."""
    target = min(max(previous.target, settings.min_replicas), settings.max_replicas)
    if _is_idle(settings, load):
        # idleSecondsToZero is a delay already.
        return Decision(0)
    known = _needed(settings, target, load)
    # A model that is not known to be idle keeps a replica.
    least = settings.min_replicas if target == 0 else max(settings.min_replicas, 1)
    needed = min(max(target if known is None else known, least), settings.max_replicas)
    if needed > target:
        return Decision(needed)
    if known is None or needed == target or not load.complete:
        return Decision(target)
    since = now if previous.fewer_since is None else min(previous.fewer_since, now)
    fewer = max(needed, previous.fewer or 0)
    if fewer >= target:
        return Decision(target)
    if now - since >= timedelta(seconds=settings.scale_down_delay_seconds):
        return Decision(fewer)
    return Decision(target, fewer, since)


def scale_down_at(settings: Autoscaling, decision: Decision) -> datetime | None:
    """Time at which replicas are removed unless the load grows; None if all are needed."""
    since = decision.fewer_since
    return None if since is None else since + timedelta(seconds=settings.scale_down_delay_seconds)


def look_again_after(settings: Autoscaling, decision: Decision, load: Load) -> timedelta | None:
    """Time after which the load is looked at again, since a report of another load is no event; None at zero, where
    only a request changes the decision, and that is one."""
    if decision.target == 0:
        return None
    due = [_LOOK_AGAIN]
    if settings.min_replicas == 0 and load.idle_seconds is not None:
        due.append(timedelta(seconds=settings.idle_seconds_to_zero - load.idle_seconds))
    return max(min(due), _SOON)


def _is_idle(settings: Autoscaling, load: Load) -> bool:
    """True if the model may have no replica."""
    return (
        settings.min_replicas == 0
        and load.complete
        and load.held == 0
        and load.idle_seconds is not None
        and load.idle_seconds >= settings.idle_seconds_to_zero
    )


def _needed(settings: Autoscaling, target: int, load: Load) -> int | None:
    """Number of replicas for this load, without the limits; None if it is unknown."""
    wanted = settings.target
    if wanted.running_per_replica is not None:
        requests = load.held + sum(replica.requests for replica in load.replicas)
        return ceil(requests / wanted.running_per_replica)
    if target == 0:
        return min(load.held, 1)
    serving = len(load.replicas)
    if wanted.kv_cache_usage is not None:
        used = [replica.kv_usage for replica in load.replicas if replica.kv_usage is not None]
        ratio = 100 * sum(used) / len(used) / wanted.kv_cache_usage if used else None
        known = len(used) == serving
    else:
        assert wanted.queue_time_ms is not None
        waited = [replica.queue_ms for replica in load.replicas if replica.queue_ms is not None]
        ratio = sum(waited) / len(waited) / wanted.queue_time_ms if waited else None
        known = len(waited) == serving
    if ratio is None:
        return None
    if ratio > 1 + _TOLERANCE:
        # At most twice those that serve: the others, which are starting, will take their part.
        return max(target, min(ceil(serving * ratio), 2 * serving))
    if not known or ratio >= 1 - _TOLERANCE:
        return target if known else None
    if wanted.kv_cache_usage is not None:
        return min(target, ceil(serving * ratio))
    return target - 1 if ratio < _LOW_QUEUE_TIME else target
