"""`status.rollout`: the part of a rollout's state that no object shows."""

from __future__ import annotations

from typing import Any

from minisgl_operator.facts.facts import Facts


def rollout_status(facts: Facts) -> dict[str, Any] | None:
    """The rollout in progress; None when all replicas have the current revision."""
    if not any(replica.has_old_template for replica in facts.replicas):
        return None
    return {"revision": facts.revision, "strategy": facts.strategy}
