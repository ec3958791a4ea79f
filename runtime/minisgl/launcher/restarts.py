"""What to do about processes that died: a function of what was seen. It knows no process, no signal and no clock.

Processes that cannot go on without each other form a group. A group is ended and started as a whole:

    waiting → starting → ready → ending → starting → …

Until every group has been ready once, a death is a failed start and ends everything: whatever is wrong then, a person
has just typed the command and can put it right. Where nobody looks on (`retry_start`), a failed start is a failure like
any other, but for one that says itself that another start would end in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec

from minisgl.options import Index, Seconds, option

END_SECONDS: Final = 60.0
"""How long killed processes may take to disappear; a device driver may have to give back memory first."""

Phase = Literal["waiting", "starting", "ready", "ending"]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of starts and restarts. Times in seconds."""

    startup_timeout: Annotated[
        Seconds, option("longest start, including weights and graphs, until it has failed", default="{:g} seconds")
    ]
    max_restarts: Annotated[
        Index, option("restarts of failed processes within --restart-window; one more failure stops the server")
    ]
    restart_window: Annotated[Seconds, option("time during which a restart counts", default="{:g} seconds")]
    retry_start: bool = False
    """Failed starts count as restarts, even before everything has been ready once."""


class GroupObservation(msgspec.Struct, frozen=True):
    """Numbers of processes of one group at one moment; `ready` counts among the living."""

    alive: int
    dead: int = 0
    ready: int = 0
    can_start: bool = True
    """Everything that the group needs is there."""
    incurable: bool = False
    """One of the dead said that another start would end in the same way."""


class GroupState(msgspec.Struct, frozen=True):
    phase: Phase = "waiting"
    since: float = 0.0
    starts: int = 0


class State(msgspec.Struct, frozen=True):
    groups: Mapping[str, GroupState]
    serving: bool = False
    """Every group has been ready once."""
    restarts: tuple[float, ...] = ()
    """When those within the window began."""


class Serve(msgspec.Struct, frozen=True):
    """The start is complete."""


class Kill(msgspec.Struct, frozen=True):
    """End the processes of the group that are left, because one `died` or the start took `too_long`."""

    group: str
    cause: Literal["died", "too_long"]


class Start(msgspec.Struct, frozen=True):
    """Start the group's processes for the `number`-th time; none of the old ones is left."""

    group: str
    number: int


class Recovered(msgspec.Struct, frozen=True):
    """A group that was started again is ready."""

    group: str
    seconds: float
    """Since its failure."""


class GiveUp(msgspec.Struct, frozen=True):
    """End everything."""

    group: str
    code: Literal["process_died", "startup_timeout", "restarts_exhausted", "process_stuck"]


Action = Serve | Kill | Start | Recovered | GiveUp


def begin(groups: tuple[str, ...], now: float, restarts: tuple[float, ...] = ()) -> State:
    """Nothing has been started yet. `restarts`: when earlier ones began that still count."""
    return State(groups={name: GroupState(since=now) for name in groups}, restarts=restarts)


def decide(
    state: State, seen: Mapping[str, GroupObservation], limits: Limits, now: float
) -> tuple[State, list[Action]]:
    """The next state, and what to do now, in this order. `GiveUp` comes alone and is the last word."""
    groups = dict(state.groups)
    restarts = tuple(time for time in state.restarts if now - time < limits.restart_window)
    actions: list[Action] = []
    for name, group in state.groups.items():
        there = seen[name]
        if group.phase == "ending" and there.alive:
            if now - group.since > END_SECONDS:
                return state, [GiveUp(name, "process_stuck")]
        elif group.phase in ("waiting", "ending"):
            if there.can_start:
                since = group.since if group.phase == "ending" else now
                groups[name] = GroupState("starting", since, group.starts + 1)
                actions.append(Start(name, group.starts + 1))
            elif group.phase == "ending":
                groups[name] = GroupState("waiting", now, group.starts)
        elif there.dead or _is_late(group, there, limits, now):
            if there.incurable if limits.retry_start else not state.serving:
                return state, [GiveUp(name, "process_died" if there.dead else "startup_timeout")]
            if len(restarts) >= limits.max_restarts:
                return state, [GiveUp(name, "restarts_exhausted")]
            restarts = (*restarts, now)
            groups[name] = GroupState("ending", now, group.starts)
            actions.append(Kill(name, "died" if there.dead else "too_long"))
        elif group.phase == "starting" and there.ready == there.alive:
            groups[name] = GroupState("ready", now, group.starts)
            if state.serving:
                actions.append(Recovered(name, now - group.since))
    serving = state.serving
    if not serving and all(group.phase == "ready" for group in groups.values()):
        serving = True
        actions.append(Serve())
    return State(groups, serving, restarts), actions


def next_deadline(state: State, limits: Limits) -> float | None:
    """When `decide` must be asked again even if nothing happens to any process."""
    allowed = {"starting": limits.startup_timeout, "ending": END_SECONDS}
    limited = [group.since + allowed[group.phase] for group in state.groups.values() if group.phase in allowed]
    return min(limited, default=None)


def _is_late(group: GroupState, seen: GroupObservation, limits: Limits, now: float) -> bool:
    return group.phase == "starting" and seen.ready < seen.alive and now - group.since > limits.startup_timeout
