"""Starts of replicas with several pods, so that no two of them hold a part of each other's GPUs for ever.

The scheduler places pods one by one. Two replicas of eight pods that start at once on eight free GPUs may get five and
three of them, and neither ever serves. So replicas of a model start one after the other, and a replica that has got
nodes for only some of its pods goes back to none. The pause after that grows and depends on the model's uid, so models
that compete do not come back at the same moment. A replica without any node holds nothing: it stays pending, for
autoscalers to see.

Count, end and cause of the pause stand in annotations of the StatefulSet, as nothing else in the cluster shows them. If
they are lost, the next attempt comes earlier, and nothing else changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, Final

from minisgl_operator.api.objects import Manifest, condition_of, has_condition, is_deleting, parse_time
from minisgl_operator.api.text import quote
from minisgl_operator.facts.pods import has_rank_0, is_unschedulable, node_of
from minisgl_operator.facts.replicas import Replica
from minisgl_operator.render import names

PARTIAL_START_TIMEOUT: Final = timedelta(seconds=60)
"""Time without a newly placed pod after which a partly placed replica goes back to no pods."""
_FIRST_PAUSE: Final = timedelta(seconds=30)
# Below the 10 minutes after which cluster-autoscaler removes a node that it has added and that no pod uses.
_LONGEST_PAUSE: Final = timedelta(seconds=300)


@dataclass(frozen=True)
class GangStarts:
    """Decides about starts of the model's replicas. `replicas` are the wanted ones; `pods` is the number of pods that
    each of them gets; replicas with an old template may have another number. `managed`: False if something other than
    the default scheduler places the pods of a replica together: then replicas start at any time."""

    replicas: tuple[Replica, ...]
    pods: int
    managed: bool
    model_uid: str
    now: datetime
    revision_has_failed: bool = False

    @cached_property
    def to_release(self) -> tuple[Replica, ...]:
        """Replicas that go back to no pods now."""
        return tuple(replica for replica in self.replicas if (end := self._deadline(replica)) and end <= self.now)

    @cached_property
    def placing(self) -> Replica | None:
        """The replica of the current revision whose pods wait for nodes. Others start after it. One with an old
        template does not count: it may never fit, and its replacement may wait for the others."""
        if not self._in_turn:
            return None
        waiting = (replica for replica in self.replicas if not replica.has_old_template and _lacks_nodes(replica))
        return next(waiting, None)

    @cached_property
    def paused(self) -> Replica | None:
        """The replica whose pods were removed, while the pause lasts."""
        ends = {replica.index: _pause_end(replica) for replica in self.replicas} if self._in_turn else {}
        return next(
            (
                replica
                for replica in self.replicas
                if (end := ends.get(replica.index)) is not None and end > self.now and replica.size == 0
            ),
            None,
        )

    def next_to_start(self, candidates: Iterable[Replica]) -> tuple[Replica, ...]:
        """The replicas without pods that get them now. `candidates` are those that could, by index."""
        if not self._in_turn:
            return tuple(candidates)
        if self.to_release or self.placing is not None or self.paused is not None:
            return ()
        return tuple(candidates)[:1]

    def annotations(self, replica: Replica) -> dict[str, str]:
        """Annotations of the replica's StatefulSet: a new pause, the current one, or none once all pods have nodes.
        An edit of the template ends the pause."""
        if not self._in_turn:
            return {}
        if replica in self.to_release:
            count = 1 + max(_partial_starts(each) for each in self.replicas)
            end = self.now + _pause(self.model_uid, count)
            found = {
                names.PARTIAL_STARTS_ANNOTATION: str(count),
                names.PAUSED_UNTIL_ANNOTATION: end.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
            return found | ({names.EXCEEDED_QUOTA_ANNOTATION: quota} if (quota := replica.exceeded_quota) else {})
        if replica.has_old_template or (replica.size > 0 and not _lacks_nodes(replica)):
            return {}
        return {name: value for name, value in _annotations(replica).items() if name in names.PAUSE_ANNOTATIONS}

    def is_partly_placed(self, pod: Manifest | None) -> bool:
        """True if the pod belongs to a replica that goes back to no pods unless more of its pods get nodes."""
        return any(pod in replica.pods and self._deadline(replica) is not None for replica in self.replicas)

    @property
    def next_change(self) -> datetime | None:
        """Time at which a replica goes back to no pods, or a pause ends; None without either."""
        deadlines = (self._deadline(each) for each in self.replicas)
        pauses = (_pause_end(each) for each in self.replicas if self._in_turn and each.size == 0)
        moments = (*deadlines, *pauses)
        return min((each for each in moments if each is not None and each > self.now), default=None)

    @property
    def _in_turn(self) -> bool:
        """True if replicas start one after the other. One of a single pod never holds a part of its GPUs."""
        return self.managed and self.pods > 1

    def _deadline(self, replica: Replica) -> datetime | None:
        """The time at which a partly placed replica goes back to no pods; None for any other replica. Each pod that
        gets a node postpones it."""
        pods = [pod for pod in replica.pods if not is_deleting(pod)]
        # Pods of one that has no size any more are about to be deleted.
        if not self.managed or replica.size == 0 or (self.revision_has_failed and replica.has_old_template):
            return None
        if not 0 < sum(map(_has_node, pods)) < (replica.size if replica.has_old_template else self.pods):
            return None
        times = _waits(replica, pods)
        return max(times) + PARTIAL_START_TIMEOUT if times else None


def _waits(replica: Replica, live: Sequence[Manifest]) -> list[datetime]:
    """Times of the last changes after which the replica waits for a pod; empty if it waits for none. `live`: its pods
    that are not deleted."""
    placed = [found for pod in live if (found := _changed(condition_of(pod, "PodScheduled"))) is not None]
    ends = [parse_time(pod["metadata"]["deletionTimestamp"]) for pod in replica.pods if is_deleting(pod)]
    if ends:
        # Until then a deleted pod drains. One that stays longer keeps its successor from being created.
        return [*placed, *ends]
    if any(map(is_unschedulable, live)):
        return placed
    # A quota, or another admission plugin, may refuse the rest. Pod 0 alone shows whether the replica serves: member
    # pods are ready as long as they have joined it. Without it they are not ready, as soon as their kubelets notice.
    reporting = [pod for pod in live if has_rank_0(pod) and _has_node(pod)] or live
    if len(live) < replica.size and not any(has_condition(pod, "Ready") for pod in reporting):
        readiness = (_changed(condition_of(pod, "Ready")) for pod in reporting)
        return [*placed, *(found for found in readiness if found is not None)]
    return []


def exceeded_quota(paused: Replica) -> str:
    """The quota that refused some of the replica's pods before its pause, in the API server's words; empty if they
    lacked nodes."""
    return quote(str(_annotations(paused).get(names.EXCEEDED_QUOTA_ANNOTATION, "")))


def _changed(condition: Mapping[str, Any] | None) -> datetime | None:
    """The time of the condition's last change; None without one."""
    stamp = (condition or {}).get("lastTransitionTime")
    return None if stamp is None else parse_time(stamp)


def is_placed_together(template: Mapping[str, Any], pods: Iterable[Manifest]) -> bool:
    """True if a queue or another scheduler decides when all pods of a replica start: the pod template names it, or
    live pods have scheduling gates, which an admission webhook has added."""
    spec, metadata = template["spec"], template["metadata"]
    keys = {*(metadata.get("labels") or {}), *(metadata.get("annotations") or {})}
    return (
        spec.get("schedulerName", names.DEFAULT_SCHEDULER) != names.DEFAULT_SCHEDULER
        or bool(spec.get("schedulingGates"))
        or not keys.isdisjoint(names.QUEUE_KEYS)
        or any((pod.get("spec") or {}).get("schedulingGates") for pod in pods)
    )


def _has_node(pod: Manifest) -> bool:
    return node_of(pod) is not None or has_condition(pod, "PodScheduled")


def _lacks_nodes(replica: Replica) -> bool:
    """True if it asks for pods that have no node, or that do not exist yet."""
    return sum(_has_node(pod) for pod in replica.pods) < replica.size


def _annotations(replica: Replica) -> Mapping[str, str]:
    return {} if replica.stateful_set is None else replica.stateful_set["metadata"].get("annotations") or {}


def _partial_starts(replica: Replica) -> int:
    count = _annotations(replica).get(names.PARTIAL_STARTS_ANNOTATION, "")
    return int(count) if count.isascii() and count.isdigit() and len(count) < 10 else 0


def _pause_end(replica: Replica) -> datetime | None:
    """The end of the replica's pause; None without one, or for an edited annotation that is no time."""
    text = _annotations(replica).get(names.PAUSED_UNTIL_ANNOTATION)
    try:
        end = None if text is None else parse_time(text)
    except ValueError:
        return None
    return None if end is None or end.tzinfo is None else end


def _pause(model_uid: str, count: int) -> timedelta:
    """The pause after this many partial starts: twice as long after each, and 50 to 150 % of that by model."""
    digest = hashlib.sha256(f"{model_uid}/{count}".encode()).digest()
    factor = 0.5 + int.from_bytes(digest[:4], "big") / 2**32
    doublings: int = min(count - 1, 10)
    return min(_FIRST_PAUSE * (1 << doublings), _LONGEST_PAUSE) * factor
