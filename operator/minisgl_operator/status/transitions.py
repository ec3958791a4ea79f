"""Events for people who read `kubectl describe`: one for each condition that changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from minisgl_operator.status.conditions import Kind, Reason

# Conditions that are false at rest, and what is nobody's fault while things are on their way.
_BAD_WHEN_TRUE: Final = frozenset({Kind.DEGRADED.value})
_ON_THE_WAY: Final = frozenset(
    reason.value
    for reason in (
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
        Reason.UP_TO_DATE,
        Reason.UNKNOWN,
    )
)


@dataclass(frozen=True)
class Notice:
    """An Event to be recorded about the model. `action` is machine-readable, for events.k8s.io/v1."""

    type: Literal["Normal", "Warning"]
    reason: str
    action: str
    note: str


def events_for(previous: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Notice, ...]:
    """Events for what changed between two statuses: a condition's status or reason, and the last death of a rank.

    Ready repeats what another condition says; it is told once.
    """
    found: dict[tuple[str, str], Notice] = {}
    for notice in (*_failures(previous, new), *_conditions(previous, new)):
        found.setdefault((notice.reason, notice.note), notice)
    return tuple(found.values())


def _conditions(previous: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Notice]:
    before = {each["type"]: (each["status"], each["reason"]) for each in previous.get("conditions") or ()}
    for condition in new.get("conditions") or ():
        kind, status, reason = condition["type"], condition["status"], condition["reason"]
        if before.get(kind) == (status, reason) or (kind not in before and _at_rest(kind, status)):
            continue
        good = status == "False" if kind in _BAD_WHEN_TRUE else status == "True"
        warns = not good and reason not in _ON_THE_WAY
        yield Notice("Warning" if warns else "Normal", reason, kind, condition["message"])


def _at_rest(kind: str, status: str) -> bool:
    """What a new model starts with and what is no news."""
    if kind in (Kind.PROGRESSING.value, Kind.DEGRADED.value):
        return status == "False"
    return kind == Kind.INTERCONNECT_OPTIMAL.value and status != "False"


def _failures(previous: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Notice]:
    before = {each["name"]: each.get("lastFailure") for each in previous.get("replicaStatuses") or ()}
    for replica in new.get("replicaStatuses") or ():
        failure = replica.get("lastFailure")
        if failure is None or failure == before.get(replica["name"]):
            continue
        rank = "its launcher" if failure.get("rank") is None else f"rank {failure['rank']}"
        code = "" if failure.get("exitCode") is None else f" with exit code {failure['exitCode']}"
        words = f": {failure['message']}" if failure.get("message") else ""
        note = f"{replica['name']}: {rank} in pod {failure.get('pod')} ended{code} ({failure.get('reason')}){words}"
        yield Notice("Warning", "RankFailed", "Recover", note)
