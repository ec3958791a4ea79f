"""`status.rollout`: the part of a rollout's state that no object shows."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from minisgl_operator.facts.facts import Facts
from minisgl_operator.facts.rollout.admission import Admission
from minisgl_operator.status.upgrade import upgrade_status


def rollout_status(facts: Facts) -> dict[str, Any]:
    """Progress of the rollout of the spec's revision. Details of one that is complete are left out."""
    progress = facts.progress
    result: dict[str, Any] = {"revision": progress.revision}
    if progress.stable is not None:
        result["stableRevision"] = progress.stable
    if progress.stable not in (None, progress.revision):
        if progress.started_at is not None:
            result["startedAt"] = _timestamp(progress.started_at)
        elif progress.elapsed_seconds:
            result["elapsedSeconds"] = progress.elapsed_seconds
        if progress.served:
            result["served"] = True
        if progress.failure:
            result["failure"] = progress.failure
    if any(replica.has_old_template for replica in facts.replicas):
        result["strategy"] = facts.next_strategy
        if facts.admission.result != "Unchecked":
            result["admission"] = _admission_status(facts.admission)
    if (upgrade := upgrade_status(facts)) is not None:
        result["upgrade"] = upgrade
    return result


def _admission_status(admission: Admission) -> dict[str, Any]:
    result: dict[str, Any] = {"revision": admission.revision, "result": admission.result}
    if admission.message:
        result["message"] = admission.message
    if admission.attempts:
        result["attempts"] = admission.attempts
    if admission.retry_at is not None:
        result["retryAt"] = _timestamp(admission.retry_at)
    return result


def _timestamp(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
