"""Whether the spec's revision serves in time, and the revision that replicas get if it does not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from minisgl_operator.api.objects import parse_time
from minisgl_operator.api.types import RolloutSpec
from minisgl_operator.facts.pods import is_unschedulable, waiting_reason
from minisgl_operator.facts.replicas import Replica


@dataclass(frozen=True)
class Progress:
    """State of the rollout of `revision`, which is the spec's.

    stable: the last revision that all replicas had and served; None if none is known.
    started_at: time at which the first replica of the revision got pods, or at which they were first refused, later
        by the time for which the model was scaled to zero since; None before, while rollouts are paused, and while the
        model shall have no replicas.
    served: a replica of the revision has served.
    failure: reason why the revision was given up; "" if it was not.
    failure_recorded: the status has the failure. Only then is the revision rolled back: that removes what shows it.
    elapsed_seconds: part of the deadline that had passed when the model was scaled to zero; 0 while started_at is set.
    """

    revision: str
    stable: str | None
    started_at: datetime | None
    served: bool
    failure: str
    failure_recorded: bool = False
    elapsed_seconds: int = 0

    def deadline(self, settings: RolloutSpec) -> datetime | None:
        """Time at which the revision is given up unless it serves; None if there is no limit."""
        if self.started_at is None or self.served or self.failure or self.stable in (None, self.revision):
            return None
        return self.started_at + timedelta(seconds=settings.progress_deadline_seconds)


def progress_of(
    revision: str,
    recorded: Mapping[str, Any],
    replicas: Iterable[Replica],
    settings: RolloutSpec,
    now: datetime,
    refusal: str | None = None,
    *,
    wanted: int,
    suspended: bool,
) -> Progress:
    """`recorded` is `status.rollout` as it was last written; the `replicas` have `revision` as their current one.
    `refusal`: the message with which the API server refuses the pods of the revision, "" if that has just ended.
    `wanted`: number of replicas that the model shall have, which is 0 if it is `suspended`."""
    replicas = tuple(replicas)
    before = recorded if recorded.get("revision") == revision else {}
    new = [each for each in replicas if each.stateful_set is not None and not each.has_old_template]
    old = [each for each in replicas if each.has_old_template]
    stable = recorded.get("stableRevision") or next((each.revision for each in old if each.serves), None)
    served = bool(before.get("served")) or stable == revision or any(each.available for each in new)
    if any(each.available for each in new) and not old:
        stable = revision
    started = parse_time(before["startedAt"]) if "startedAt" in before else None
    elapsed = int(before.get("elapsedSeconds") or 0)
    if settings.paused or suspended:
        started, elapsed = None, 0
    elif wanted == 0:
        # Replicas that nobody wants cannot serve. But an autoscaler may go to zero before each deadline, so the time
        # goes on from here with the next replica.
        elapsed = elapsed if started is None else max(0, int((now - started).total_seconds()))
        started = None
    elif any(each.size > 0 for each in new) or refusal:
        if started is None:
            started, elapsed = now - timedelta(seconds=elapsed), 0
    elif refusal == "":
        started, elapsed = None, 0
    # Otherwise it goes on: a replica of several pods may be back at none for a pause, and each attempt to place it is
    # shorter than the deadline.
    failure = "" if served else str(before.get("failure") or "")
    found = Progress(revision, stable, started, served, failure, bool(failure), elapsed)
    if served or found.failure or stable is None or settings.paused:
        return found
    failed = next((each for each in new if each.phase == "Failed"), None)
    if failed is not None:
        return Progress(revision, stable, started, served, f"{failed.name} has failed{_last_output(failed)}")
    if (deadline := found.deadline(settings)) is not None and deadline <= now:
        text = f"no replica served within {settings.progress_deadline_seconds} s{_cause(new, refusal)}"
        return Progress(revision, stable, started, served, text)
    return found


def _cause(replicas: Iterable[Replica], refusal: str | None) -> str:
    """The state of a pod that explains why no replica serves, as far as it is known."""
    if refusal:
        return f": the API server refuses its pods: {refusal}"
    for replica in replicas:
        if replica.pods_refused:
            return f": the API server refuses pods of {replica.name}"
        for pod in replica.pods:
            name = pod["metadata"]["name"]
            if is_unschedulable(pod):
                return f": pod {name} gets no node"
            if reason := waiting_reason(pod):
                return f": pod {name} waits ({reason})"
    return ""


def _last_output(replica: Replica) -> str:
    failure = replica.last_failure
    reason = None if failure is None else failure.get("reason")
    return f": {reason}" if reason else ""
