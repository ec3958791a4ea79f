"""Kubernetes Events about a model: one for each condition that changed, and one for each rank that ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from minisgl_operator.api.conditions import ConditionType, Reason

# Types whose False is the good state.
_NEGATIVE_POLARITY: Final = frozenset({ConditionType.DEGRADED})
_REPEATED: Final = frozenset({ConditionType.RECONCILING, ConditionType.STALLED})
"""Types that repeat another condition."""
# Reasons that call for no action: something is in progress.
_IN_PROGRESS_REASONS: Final = frozenset(
    {
        Reason.WAITING_FOR_FETCH,
        Reason.DOWNLOADING,
        Reason.PENDING,
        Reason.WAITING_FOR_MODEL,
        Reason.WAITING_FOR_PODS,
        Reason.LOADING,
        Reason.RENDEZVOUS,
        Reason.DRAINING,
        Reason.STARTING,
        Reason.NO_REPLICA_ROUTABLE,
        Reason.SUSPENDED,
        Reason.SCALED_TO_ZERO,
        Reason.UP_TO_DATE,
        Reason.UPGRADE_WAITING,
        Reason.UNKNOWN,
        Reason.WAITING_FOR_GATEWAY,
    }
)


@dataclass(frozen=True)
class ModelEvent:
    """An Event about the model. `action` is machine-readable, for events.k8s.io/v1."""

    type: Literal["Normal", "Warning"]
    reason: str
    action: str
    note: str


def events_for(previous: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[ModelEvent, ...]:
    """Events for the changes between two statuses. Ready repeats another condition, which makes one event of both."""
    found: dict[tuple[str, str], ModelEvent] = {}
    for event in (*_failures(previous, new), *_conditions(previous, new)):
        found.setdefault((event.reason, event.note), event)
    return tuple(found.values())


def _conditions(previous: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[ModelEvent]:
    before = {each["type"]: (each["status"], each["reason"]) for each in previous.get("conditions") or ()}
    for condition in new.get("conditions") or ():
        type, status, reason = condition["type"], condition["status"], condition["reason"]
        if type in _REPEATED:
            continue
        if before.get(type) == (status, reason) or (type not in before and _is_initial(type, status)):
            continue
        good = status == ("False" if type in _NEGATIVE_POLARITY else "True")
        warns = not good and reason not in _IN_PROGRESS_REASONS
        yield ModelEvent("Warning" if warns else "Normal", reason, type, condition["message"])


def _is_initial(type: str, status: str) -> bool:
    """True if a new model has this status, so that no event is needed."""
    if type in (ConditionType.PROGRESSING, ConditionType.DEGRADED):
        return status == "False"
    return type == ConditionType.INTERCONNECT_OPTIMAL and status != "False"


def _identity(failure: Mapping[str, Any] | None) -> object:
    """What tells a failure from the one before. Its texts depend on the room in the status."""
    return failure and tuple(failure.get(name) for name in ("rank", "exitCode", "at"))


def _failures(previous: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[ModelEvent]:
    before = {each["name"]: _identity(each.get("lastFailure")) for each in previous.get("replicaStatuses") or ()}
    for replica in new.get("replicaStatuses") or ():
        failure = replica.get("lastFailure")
        if failure is None or _identity(failure) == before.get(replica["name"]):
            continue
        rank = "its launcher" if failure.get("rank") is None else f"rank {failure['rank']}"
        if failure.get("node"):
            where = f"pod {failure.get('pod')} was refused or ended by node {failure['node']}"
            note = f"{replica['name']}: {where} ({failure.get('reason')}): {failure.get('message', '')}"
            yield ModelEvent("Warning", "PodEndedByNode", "Recover", note)
            continue
        code = "" if failure.get("exitCode") is None else f" with exit code {failure['exitCode']}"
        output = f": {failure['message']}" if failure.get("message") else ""
        note = f"{replica['name']}: {rank} in pod {failure.get('pod')} ended{code} ({failure.get('reason')}){output}"
        yield ModelEvent("Warning", "RankFailed", "Recover", note)
