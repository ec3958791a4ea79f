"""What a model's plan and status are when time passes and nothing else happens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta

from minisgl_operator.facts.facts import Facts
from minisgl_operator.plan.plan import Step, plan
from minisgl_operator.status.status import Status, derive_status


def recorded(facts: Facts) -> Facts:
    """The facts behind the status that follows from them, as a reconcile writes it."""
    for _ in range(10):
        before = facts.observed.model_object
        status = derive_status(facts, before.get("status") or {})
        if status == before.get("status"):
            return facts
        facts = facts.seen_again(replace(facts.observed, model_object={**before, "status": status}), facts.turn)
    raise AssertionError("each status leads to another one")


def outcome(facts: Facts, now: datetime) -> tuple[tuple[Step, ...], Status]:
    """Plan and status at a time."""
    facts = facts.seen_again(facts.observed, facts.turn, now)
    return plan(facts), derive_status(facts, facts.observed.model_object["status"])


def instants(start: datetime, end: datetime) -> Iterator[datetime]:
    """Some instants in [start, end), the last one up to a second before the end."""
    for part in range(1, 8):
        yield start + part / 8 * (end - start)
    yield max(start, end - timedelta(seconds=1))
    yield end - timedelta(microseconds=1)
