"""Decisions about processes that died or hang: a pure function of what was observed, without processes, signals and
clocks.

Processes that depend on each other form a group, which is terminated and started as a whole:

    waiting → starting → ready → terminating → starting → …

Until every group has been ready once, an exit is a failed start, and the launcher gives up: a user has just typed the
command and can correct it. With `retry_start`, for launchers without a user, a failed start is a failure like any
other, unless its start error shows that another start would fail in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec

from minisgl.options import Index, Seconds, option

KILL_SECONDS: Final = 60.0
"""Longest time until killed processes are reaped; a device driver may have to free memory first."""

Phase = Literal["waiting", "starting", "ready", "terminating"]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of starts and restarts. Times in seconds."""

    startup_timeout: Annotated[
        Seconds, option("maximum time of a start, including weights and graphs", default="{:g} seconds")
    ]
    max_restarts: Annotated[
        Index, option("maximum number of restarts within --restart-window; one more failure is final")
    ]
    restart_window: Annotated[Seconds, option("time window in which restarts are counted", default="{:g} seconds")]
    retry_start: bool = False
    """Failed starts count as restarts, even before every group has been ready once."""


class GroupObservation(msgspec.Struct, frozen=True):
    """Numbers of processes of one group at one moment; `ready` ones are alive."""

    alive: int
    dead: int = 0
    ready: int = 0
    hung: int = 0
    can_start: bool = True
    """Everything that the group needs is there."""
    permanent: bool = False
    """A dead process has reported an error with which another start would fail too."""


class GroupState(msgspec.Struct, frozen=True):
    """Phase of a group, the time when it began, and the number of starts."""

    phase: Phase = "waiting"
    since: float = 0.0
    starts: int = 0


class State(msgspec.Struct, frozen=True):
    """State of all groups."""

    groups: Mapping[str, GroupState]
    started: bool = False
    """Every group has been ready once."""
    restarts: tuple[float, ...] = ()
    """Times of the restarts within the window."""


class Started(msgspec.Struct, frozen=True):
    """Every group is ready for the first time."""


class KillGroup(msgspec.Struct, frozen=True):
    """Kill the remaining processes of the group, because one `died` or is `hung`, or the start took `too_long`."""

    group: str
    cause: Literal["died", "hung", "too_long"]


class StartGroup(msgspec.Struct, frozen=True):
    """Start the group for the `number`-th time; all of its old processes are dead."""

    group: str
    number: int


class Recovered(msgspec.Struct, frozen=True):
    """A restarted group is ready."""

    group: str
    seconds: float
    """Time since its failure."""


class GiveUp(msgspec.Struct, frozen=True):
    """Stop all processes."""

    group: str
    code: Literal["process_died", "startup_timeout", "restarts_exhausted", "process_stuck"]


Action = Started | KillGroup | StartGroup | Recovered | GiveUp


def initial_state(groups: tuple[str, ...], now: float, restarts: tuple[float, ...] = ()) -> State:
    """State before the first start. `restarts`: times of earlier restarts that still count."""
    return State(groups={name: GroupState(since=now) for name in groups}, restarts=restarts)


def decide(
    state: State, observed: Mapping[str, GroupObservation], limits: Limits, now: float
) -> tuple[State, list[Action]]:
    """Return the next state, and the actions to take now, in this order. `GiveUp` is always the only action."""
    groups = dict(state.groups)
    restarts = tuple(time for time in state.restarts if now - time < limits.restart_window)
    actions: list[Action] = []
    for name, group in state.groups.items():
        seen = observed[name]
        if group.phase == "terminating" and seen.alive:
            if now - group.since > KILL_SECONDS:
                return state, [GiveUp(name, "process_stuck")]
        elif group.phase in ("waiting", "terminating"):
            if seen.can_start:
                since = group.since if group.phase == "terminating" else now
                groups[name] = GroupState("starting", since, group.starts + 1)
                actions.append(StartGroup(name, group.starts + 1))
            elif group.phase == "terminating":
                groups[name] = GroupState("waiting", now, group.starts)
        elif cause := _failure(state, group, seen, limits, now):
            if seen.permanent if limits.retry_start else not state.started:
                return state, [GiveUp(name, "startup_timeout" if cause == "too_long" else "process_died")]
            if len(restarts) >= limits.max_restarts:
                return state, [GiveUp(name, "restarts_exhausted")]
            restarts = (*restarts, now)
            groups[name] = GroupState("terminating", now, group.starts)
            actions.append(KillGroup(name, cause))
        elif group.phase == "starting" and seen.ready == seen.alive:
            groups[name] = GroupState("ready", now, group.starts)
            if state.started:
                actions.append(Recovered(name, now - group.since))
    started = state.started
    if not started and all(group.phase == "ready" for group in groups.values()):
        started = True
        actions.append(Started())
    return State(groups, started, restarts), actions


def next_deadline(state: State, limits: Limits) -> float | None:
    """Time at which to call `decide` again even if no process changes; None: no deadline."""
    allowed = {"starting": limits.startup_timeout, "terminating": KILL_SECONDS}
    limited = [group.since + allowed[group.phase] for group in state.groups.values() if group.phase in allowed]
    return min(limited, default=None)


def _failure(
    state: State, group: GroupState, seen: GroupObservation, limits: Limits, now: float
) -> Literal["died", "hung", "too_long"] | None:
    """Failure of a group that is starting or ready."""
    if seen.dead:
        return "died"
    if group.phase == "starting":
        late = seen.ready < seen.alive and now - group.since > limits.startup_timeout
        return "too_long" if late else None
    # Before all groups are ready there are no requests, and an exit would be final.
    return "hung" if seen.hung and (state.started or limits.retry_start) else None
