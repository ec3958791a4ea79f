"""Which models may be upgraded now, of all models that the operator manages. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

State = Literal["Current", "Waiting", "Excluded", "Upgrading", "Upgraded", "Failed"]
"""State of one model's upgrade, as `status.rollout.upgrade.state` describes it."""

Key = tuple[str, str]
"""Namespace and name of a model."""


@dataclass(frozen=True)
class Member:
    """One model; `wave` is the position of its wave."""

    wave: int
    state: State


@dataclass(frozen=True)
class Decision:
    """`admitted`: models that may begin. `wave`: the wave in progress; None if there is nothing to upgrade. `failed`: a
    model whose upgrade failed, for which all others wait."""

    admitted: frozenset[Key] = frozenset()
    wave: int | None = None
    failed: Key | None = None


@dataclass(frozen=True)
class Turn:
    """What one model knows of the others: whether it may begin, its wave and the wave in progress ("": none), the model
    whose upgrade failed ("": none), and the time at which upgrades may begin again (None: they may)."""

    admitted: bool
    wave: str
    current_wave: str = ""
    failed: str = ""
    opens_at: datetime | None = None


def decide(members: Mapping[Key, Member], max_models: int, is_open: bool = True) -> Decision:
    """The models that may begin their upgrade: of the first wave that is not done, in the order of their names, as long
    as fewer than `max_models` are in an upgrade. None may while one has failed, or outside the window.

    The same members always give the same decision, so it does not matter which of them asks first."""
    open = {key: each for key, each in members.items() if each.state in ("Waiting", "Upgrading", "Failed")}
    if not open:
        return Decision()
    wave = min(each.wave for each in open.values())
    failed = min((key for key, each in open.items() if each.state == "Failed"), default=None)
    if failed is not None or not is_open:
        return Decision(wave=wave, failed=failed)
    room = max_models - sum(each.state == "Upgrading" for each in open.values())
    waiting = sorted(key for key, each in open.items() if each == Member(wave, "Waiting"))
    return Decision(frozenset(waiting[: max(0, room)]), wave)
