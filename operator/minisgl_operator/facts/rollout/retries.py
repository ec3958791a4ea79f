"""New attempts for replicas that have used up their restarts: after a pause that doubles with each failure. Pure.

The number of failures is in the status: a pod that was created again does not know it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from minisgl_operator.api.objects import is_deleting, parse_time
from minisgl_operator.api.text import truncate
from minisgl_operator.facts.observed import Report
from minisgl_operator.facts.pods import node_of
from minisgl_operator.facts.replicas import Replica

_FIRST_PAUSE: Final = timedelta(minutes=1)
_LONGEST_PAUSE: Final = timedelta(hours=1)
_MAX_ERRORS: Final = 8
_MAX_LENGTH: Final = 256
_NUMBER: Final = re.compile(r"0x[0-9a-fA-F]+|[0-9]+")

MODEL_REJECTIONS: Final = frozenset({"InvalidModel", "TensorDoesNotDivideHeads"})
"""Reasons of failures that only another spec cures."""


@dataclass(frozen=True)
class NodeError:
    """An error without its numbers, and how often a replica failed with it on a node."""

    node: str
    error: str
    count: int = 1


@dataclass(frozen=True)
class Retry:
    """Failures of a replica of one revision.

    failures: how often it has used up its restarts since it last served for a while.
    leader_start: start of the leader that failed last, in ms since 1970, as in its epoch.
    failed_at: when this was seen.
    waits: the replica has failed, and its pods have not been deleted yet.
    """

    revision: str
    failures: int
    leader_start: int
    failed_at: datetime
    errors: tuple[NodeError, ...] = ()
    waits: bool = False

    @property
    def pause(self) -> timedelta:
        """Time from the last failure to the next attempt."""
        return min(_FIRST_PAUSE * (1 << min(self.failures - 1, 16)), _LONGEST_PAUSE)

    @property
    def retry_at(self) -> datetime:
        return self.failed_at + self.pause

    @property
    def bad_nodes(self) -> tuple[str, ...]:
        """Nodes on which the same error came at least twice."""
        return tuple(sorted({each.node for each in self.errors if each.count > 1}))


def retry_of(replica: Replica, before: Mapping[str, Any], window: timedelta, now: datetime) -> Retry | None:
    """The failures of a replica; None without any. `before` is its last status. They are forgotten when the replica
    has served without interruption for `window` longer than the pause lasted."""
    previous = _previous(replica, before)
    report = replica.report
    if report is not None and report.get("phase") == "Failed" and not any(map(is_deleting, replica.pods)):
        start = _leader_start(report)
        if start is None or _is_rejection(replica.last_failure):
            return None
        if previous is not None and previous.leader_start == start:
            return previous
        errors = previous.errors if previous is not None else ()
        return Retry(
            revision=str(replica.revision),
            failures=1 if previous is None else previous.failures + 1,
            leader_start=start,
            failed_at=now.replace(microsecond=0),
            errors=_with_error(errors, _error_of(replica)),
            waits=True,
        )
    if previous is not None and (end := forgotten_at(previous, replica, window, now)) is not None and now >= end:
        return None
    return previous


def forgotten_at(retry: Retry, replica: Replica, window: timedelta, now: datetime) -> datetime | None:
    """Time at which the failures of a replica are forgotten if it serves until then; None while it does not serve."""
    if replica.ready_since is None:
        return None
    # The start may have taken longer than `window`. A clock of a node may be behind, or ahead.
    return min(max(replica.ready_since, retry.failed_at), now) + retry.pause + window


def _previous(replica: Replica, before: Mapping[str, Any]) -> Retry | None:
    """The failures in the last status; None for another revision."""
    found = before.get("retry")
    if found is None or found.get("revision") != replica.revision:
        return None
    start = None if replica.report is None else _leader_start(replica.report)
    failed = replica.report is not None and replica.report.get("phase") == "Failed"
    return Retry(
        revision=found["revision"],
        failures=int(found["failures"]),
        leader_start=int(found["leaderStart"]),
        failed_at=parse_time(found["failedAt"]),
        errors=tuple(NodeError(one["node"], one["error"], int(one["count"])) for one in found.get("errors") or ()),
        waits=failed and start == int(found["leaderStart"]) and not all(map(is_deleting, replica.pods)),
    )


def _leader_start(report: Report) -> int | None:
    epoch = report.get("epoch")
    return int(epoch[0]) if isinstance(epoch, list | tuple) and epoch and isinstance(epoch[0], int) else None


def _is_rejection(failure: Report | None) -> bool:
    return failure is not None and failure.get("reason") in MODEL_REJECTIONS


def _error_of(replica: Replica) -> NodeError | None:
    """The last failure and the node of its rank; None if either is unknown."""
    failure = replica.last_failure
    if failure is None:
        return None
    node = next((node_of(pod) for pod in replica.pods if pod["metadata"]["name"] == failure.get("pod")), None)
    if node is None:
        return None
    text = f"{failure.get('reason') or 'Error'}: {failure.get('message') or ''}"
    # Times, addresses and process ids differ each time.
    return NodeError(node, truncate(_NUMBER.sub("#", text), _MAX_LENGTH))


def _with_error(errors: tuple[NodeError, ...], new: NodeError | None) -> tuple[NodeError, ...]:
    if new is None:
        return errors
    return tuple(_counted(errors, new))[-_MAX_ERRORS:]


def _counted(errors: tuple[NodeError, ...], new: NodeError) -> Iterator[NodeError]:
    """The errors with one more, the last one last."""
    same = 0
    for each in errors:
        # A status of many replicas has the beginning of an error only.
        if each.node == new.node and new.error.startswith(each.error.removesuffix("…")):
            same = each.count
        else:
            yield each
    yield NodeError(new.node, new.error, same + 1)
