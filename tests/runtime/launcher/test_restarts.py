"""Decisions about dead and hung processes: a table of cases, and properties of any history."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minisgl.launcher.restarts import (
    KILL_SECONDS,
    Action,
    GiveUp,
    GroupObservation,
    GroupState,
    KillGroup,
    Limits,
    Recovered,
    Started,
    StartGroup,
    State,
    decide,
    initial_state,
    next_deadline,
)

_LIMITS = Limits(max_restarts=2, restart_window=100.0, startup_timeout=30.0)
_NOW = 1000.0

_WAITING = GroupState("waiting", _NOW - 900)
_STARTING = GroupState("starting", _NOW - 1, 1)
_LATE = GroupState("starting", _NOW - 31, 1)
_READY = GroupState("ready", _NOW - 500, 1)
_TERMINATING = GroupState("terminating", _NOW - 1, 2)
_STUCK = GroupState("terminating", _NOW - KILL_SECONDS - 1, 2)

_NOTHING = {"engine": GroupObservation(0), "frontend": GroupObservation(0)}
_ALL_READY = GroupObservation(alive=2, ready=2)
_LOADING = GroupObservation(alive=2, ready=1)
_ONE_DEAD = GroupObservation(alive=1, dead=1, ready=1)
_ALL_DEAD = GroupObservation(alive=0, dead=2)
_ONE_HUNG = GroupObservation(alive=2, ready=2, hung=1)
_ONE_DEAD_ONE_HUNG = GroupObservation(alive=1, dead=1, ready=1, hung=1)


@pytest.mark.parametrize(
    ("group", "started", "restarts", "seen", "expected", "phase"),
    [
        (_WAITING, False, (), GroupObservation(0), [StartGroup("engine", 1)], "starting"),
        (_WAITING, False, (), GroupObservation(0, can_start=False), [], "waiting"),
        (_TERMINATING, True, (_NOW - 1,), GroupObservation(0, dead=2, can_start=False), [], "waiting"),
        (_TERMINATING, True, (_NOW - 1,), GroupObservation(1, dead=1, can_start=False), [], "terminating"),
        (_STARTING, False, (), _LOADING, [], "starting"),
        (_STARTING, False, (), _ALL_READY, [Started()], "ready"),
        (_STARTING, False, (), _ONE_DEAD, [GiveUp("engine", "process_died")], "starting"),
        (_STARTING, False, (), _ALL_DEAD, [GiveUp("engine", "process_died")], "starting"),
        (_LATE, False, (), _LOADING, [GiveUp("engine", "startup_timeout")], "starting"),
        (_LATE, False, (), _ALL_READY, [Started()], "ready"),
        (_READY, False, (), _ONE_DEAD, [GiveUp("engine", "process_died")], "ready"),
        (_READY, True, (), _ALL_READY, [], "ready"),
        (_READY, True, (), _ONE_DEAD, [KillGroup("engine", "died")], "terminating"),
        (_READY, True, (_NOW - 9, _NOW - 5), _ONE_DEAD, [GiveUp("engine", "restarts_exhausted")], "ready"),
        (_READY, True, (_NOW - 101, _NOW - 5), _ONE_DEAD, [KillGroup("engine", "died")], "terminating"),
        (_READY, True, (), _ONE_HUNG, [KillGroup("engine", "hung")], "terminating"),
        (_READY, True, (), _ONE_DEAD_ONE_HUNG, [KillGroup("engine", "died")], "terminating"),
        (_READY, True, (_NOW - 9, _NOW - 5), _ONE_HUNG, [GiveUp("engine", "restarts_exhausted")], "ready"),
        (_STARTING, True, (_NOW - 2,), GroupObservation(alive=2, ready=1, hung=1), [], "starting"),
        (_TERMINATING, True, (_NOW - 1,), _ONE_HUNG, [], "terminating"),
        (_TERMINATING, True, (_NOW - 1,), _ONE_DEAD, [], "terminating"),
        (_TERMINATING, True, (_NOW - 1,), _ALL_DEAD, [StartGroup("engine", 3)], "starting"),
        (_STUCK, True, (_NOW - 61,), _ONE_DEAD, [GiveUp("engine", "process_stuck")], "terminating"),
        (_STUCK, True, (_NOW - 61,), _ALL_DEAD, [StartGroup("engine", 3)], "starting"),
        (_STARTING, True, (_NOW - 2,), _LOADING, [], "starting"),
        (_STARTING, True, (_NOW - 2,), _ALL_READY, [Recovered("engine", 1.0)], "ready"),
        (_STARTING, True, (_NOW - 2,), _ONE_DEAD, [KillGroup("engine", "died")], "terminating"),
        (_LATE, True, (_NOW - 32,), _LOADING, [KillGroup("engine", "too_long")], "terminating"),
        (_LATE, True, (_NOW - 32, _NOW - 31), _LOADING, [GiveUp("engine", "restarts_exhausted")], "starting"),
    ],
)
def test_decisions_about_one_group(
    group: GroupState,
    started: bool,
    restarts: tuple[float, ...],
    seen: GroupObservation,
    expected: list[Action],
    phase: str,
) -> None:
    state, actions = decide(State({"engine": group}, started, restarts), {"engine": seen}, _LIMITS, _NOW)
    assert actions == expected
    assert state.groups["engine"].phase == phase


def test_a_hang_before_the_first_requests_waits_until_all_groups_are_ready() -> None:
    state = State({"engine": _READY, "frontend": _STARTING})
    loading, ready = GroupObservation(1), GroupObservation(1, ready=1)
    state, actions = decide(state, {"engine": _ONE_HUNG, "frontend": loading}, _LIMITS, _NOW)
    assert actions == []
    state, actions = decide(state, {"engine": _ONE_HUNG, "frontend": ready}, _LIMITS, _NOW)
    assert actions == [Started()]
    _, actions = decide(state, {"engine": _ONE_HUNG, "frontend": ready}, _LIMITS, _NOW)
    assert actions == [KillGroup("engine", "hung")]


def test_with_retried_starts_a_hang_is_never_final() -> None:
    limits = Limits(max_restarts=2, restart_window=100.0, startup_timeout=30.0, retry_start=True)
    _, actions = decide(State({"engine": _READY}), {"engine": _ONE_HUNG}, limits, _NOW)
    assert actions == [KillGroup("engine", "hung")]


def test_groups_restart_separately_but_share_the_budget() -> None:
    state = State({"engine": _READY, "frontend": _READY}, started=True)
    healthy, dead = GroupObservation(1, ready=1), GroupObservation(0, dead=1)
    state, actions = decide(state, {"engine": healthy, "frontend": dead}, _LIMITS, _NOW)
    assert actions == [KillGroup("frontend", "died")]
    assert state.groups["engine"] == _READY
    state, actions = decide(state, {"engine": dead, "frontend": dead}, _LIMITS, _NOW + 1)
    assert actions == [KillGroup("engine", "died"), StartGroup("frontend", 2)]
    state, actions = decide(state, {"engine": dead, "frontend": dead}, _LIMITS, _NOW + 2)
    assert actions == [GiveUp("frontend", "restarts_exhausted")]


def test_started_is_reported_once_when_all_groups_are_ready() -> None:
    loading, ready = GroupObservation(1), GroupObservation(1, ready=1)
    state, actions = decide(initial_state(("engine", "frontend"), _NOW), _NOTHING, _LIMITS, _NOW)
    assert actions == [StartGroup("engine", 1), StartGroup("frontend", 1)]
    state, actions = decide(state, {"engine": loading, "frontend": ready}, _LIMITS, _NOW + 1)
    assert (state.started, actions) == (False, [])
    state, actions = decide(state, {"engine": ready, "frontend": ready}, _LIMITS, _NOW + 2)
    assert (state.started, actions) == (True, [Started()])
    assert decide(state, {"engine": ready, "frontend": ready}, _LIMITS, _NOW + 3) == (state, [])


def test_the_next_deadline_is_the_first_timeout_of_any_group() -> None:
    state = State({"a": _STARTING, "b": _READY, "c": _TERMINATING}, started=True)
    assert next_deadline(state, _LIMITS) == _NOW - 1 + _LIMITS.startup_timeout
    assert next_deadline(State({"b": _READY}, started=True), _LIMITS) is None
    late = _NOW + _LIMITS.startup_timeout
    _, actions = decide(State({"a": _STARTING}, True), {"a": GroupObservation(1)}, _LIMITS, late)
    assert actions == [KillGroup("a", "too_long")]


_events = st.lists(
    st.tuples(
        st.floats(0, 50),
        st.sampled_from(["die", "hang", "ready", "reaped", "nothing"]),
        st.sampled_from(["engine", "frontend"]),
    ),
    max_size=60,
)


@example([(0.0, "ready", "frontend"), (0.0, "hang", "frontend"), (0.0, "ready", "engine")], 0)
@given(_events, st.integers(0, 4))
def test_any_history_of_exits_keeps_the_budget(events: list[tuple[float, str, str]], max_restarts: int) -> None:
    """Simulated processes: killed ones may take a while to exit, and any process may die at any moment."""
    limits = Limits(max_restarts=max_restarts, restart_window=100.0, startup_timeout=math.inf)
    now = 0.0
    state, _ = decide(initial_state(("engine", "frontend"), now), _NOTHING, limits, now)
    seen = {"engine": GroupObservation(2), "frontend": GroupObservation(1)}
    kills: list[float] = []
    for passed, event, name in events:
        now += passed
        there = seen[name]
        if event == "die" and there.alive:
            seen[name] = GroupObservation(there.alive - 1, there.dead + 1, min(there.ready, there.alive - 1))
        elif event == "hang" and there.ready:
            seen[name] = GroupObservation(there.alive, there.dead, there.ready, hung=1)
        elif event == "ready":
            seen[name] = GroupObservation(there.alive, there.dead, there.alive)
        elif event == "reaped" and state.groups[name].phase == "terminating":
            seen[name] = GroupObservation(0, there.alive + there.dead)
        # As the supervisor does: no event announces the actions that follow from others.
        while True:
            served = state.started
            state, actions = decide(state, seen, limits, now)
            if not actions:
                break
            for action in actions:
                match action:
                    case KillGroup():
                        assert served and (seen[action.group].dead or seen[action.group].hung)
                        kills.append(now)
                    case StartGroup():
                        assert not seen[action.group].alive, "two of a kind would fight for the device"
                        seen[action.group] = GroupObservation(2 if action.group == "engine" else 1)
                    case GiveUp():
                        assert actions == [action]
                        if action.code == "restarts_exhausted":
                            assert len([time for time in kills if now - time < 100]) >= max_restarts
                        return
        assert len([time for time in kills if now - time < 100]) <= max_restarts
        for group, is_ in state.groups.items():
            assert is_.phase == "terminating" or not seen[group].dead, "a death is answered at once"
            assert not (state.started and is_.phase == "ready" and seen[group].hung), "and so is a hang"
