"""`status.rollout`: the part of a rollout's state that no object shows."""

from __future__ import annotations

from datetime import UTC
from typing import Any

from minisgl_operator.facts.facts import Facts


def rollout_status(facts: Facts) -> dict[str, Any]:
    """Progress of the rollout of the spec's revision. Details of one that is complete are left out."""
    progress = facts.progress
    result: dict[str, Any] = {"revision": progress.revision}
    if progress.stable is not None:
        result["stableRevision"] = progress.stable
    if progress.stable not in (None, progress.revision):
        if progress.started_at is not None:
            result["startedAt"] = progress.started_at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        if progress.served:
            result["served"] = True
        if progress.failure:
            result["failure"] = progress.failure
    if any(replica.has_old_template for replica in facts.replicas):
        result["strategy"] = facts.next_strategy
    return result
