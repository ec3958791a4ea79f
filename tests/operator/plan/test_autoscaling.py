"""The autoscaler's decisions from observed loads."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl_operator.api.autoscaling import Autoscaling
from minisgl_operator.facts.autoscaling import Decision, Load, ReplicaLoad, decide, look_again_after, scale_down_at

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def settings(target: dict[str, int] | None = None, **fields: Any) -> Autoscaling:
    defaults = {"minReplicas": 1, "maxReplicas": 8, "scaleDownDelaySeconds": 300, "idleSecondsToZero": 60}
    return Autoscaling.model_validate({**defaults, "target": target or {"runningPerReplica": 4}, **fields})


def load(*requests: int, held: int = 0, idle: float | None = 0.0, complete: bool = True) -> Load:
    return Load(held, tuple(map(ReplicaLoad, requests)), idle, complete)


def after(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def test_replicas_are_added_at_once_for_the_requests_that_run_wait_and_are_held() -> None:
    assert decide(settings(), Decision(1), load(9), NOW) == Decision(3)
    assert decide(settings(), Decision(1), load(4), NOW) == Decision(1)
    assert decide(settings(), Decision(1), load(4, held=1), NOW) == Decision(2)


def test_replicas_are_removed_when_fewer_have_sufficed_for_the_whole_delay() -> None:
    first = decide(settings(), Decision(3), load(1, 1, 1), NOW)
    assert first == Decision(3, 1, NOW)
    peak = decide(settings(), first, load(3, 2, 2), after(100))
    assert peak == Decision(3, 2, NOW)
    assert decide(settings(), peak, load(1, 1, 1), after(299)) == peak
    assert decide(settings(), peak, load(1, 1, 1), after(300)) == Decision(2), "the most that the time needed"


def test_a_peak_starts_the_delay_again() -> None:
    waiting = Decision(3, 1, NOW)
    assert decide(settings(), waiting, load(4, 4, 1), after(200)) == Decision(3)


def test_an_unknown_load_removes_nothing_and_starts_the_delay_again() -> None:
    waiting = Decision(3, 1, NOW)
    assert decide(settings(), waiting, load(1, complete=False), after(500)) == Decision(3)
    by_usage = settings({"kvCacheUsage": 50})
    assert decide(by_usage, waiting, load(1, 1, 1), after(500)) == Decision(3), "no replica reports its usage"


def test_the_known_part_of_a_load_adds_replicas() -> None:
    assert decide(settings(), Decision(1), load(9, complete=False), NOW) == Decision(3)


def test_a_clock_that_is_ahead_does_not_prolong_the_delay() -> None:
    assert decide(settings(), Decision(3, 1, after(9_999)), load(1), NOW) == Decision(3, 1, NOW)


def test_no_delay_removes_replicas_at_once() -> None:
    assert decide(settings(scaleDownDelaySeconds=0), Decision(3), load(1), NOW) == Decision(1)


def test_edited_limits_hold_at_once() -> None:
    assert decide(settings(maxReplicas=2), Decision(5, 4, NOW), load(9, 9), NOW) == Decision(2)
    assert decide(settings(maxReplicas=2), Decision(5, 4, NOW), load(1, complete=False), NOW) == Decision(2)
    assert decide(settings(minReplicas=4), Decision(1), load(1), NOW) == Decision(4)


def test_the_usage_of_the_kv_cache_is_spread_over_more_replicas() -> None:
    by_usage = settings({"kvCacheUsage": 50})

    def used(*parts: float) -> Load:
        return Load(0, tuple(ReplicaLoad(1, kv_usage=part) for part in parts), 0.0, True)

    assert decide(by_usage, Decision(2), used(0.9, 0.8), NOW) == Decision(4)
    assert decide(by_usage, Decision(2), used(0.52, 0.5), NOW) == Decision(2), "within the tolerance"
    assert decide(by_usage, Decision(1), used(5.0), NOW) == Decision(2), "at most twice those that serve"
    assert decide(by_usage, Decision(2), used(1.0), NOW) == Decision(2), "the second one is starting"
    assert decide(by_usage, Decision(4), used(0.1, 0.1, 0.1, 0.1), NOW) == Decision(4, 1, NOW)


def test_queue_times_remove_one_replica_at_a_time() -> None:
    by_time = settings({"queueTimeMs": 100})

    def waited(*ms: float) -> Load:
        return Load(0, tuple(ReplicaLoad(1, queue_ms=each) for each in ms), 0.0, True)

    assert decide(by_time, Decision(2), waited(150.0, 150.0), NOW) == Decision(3)
    assert decide(by_time, Decision(4), waited(0.0, 0.0, 0.0, 0.0), NOW) == Decision(4, 3, NOW)
    assert decide(by_time, Decision(4), waited(60.0, 60.0, 60.0, 60.0), NOW) == Decision(4)


@pytest.mark.parametrize("target", [{"runningPerReplica": 4}, {"queueTimeMs": 100}, {"kvCacheUsage": 80}])
def test_a_model_without_replicas_starts_with_the_first_held_request(target: dict[str, int]) -> None:
    to_zero = settings(target, minReplicas=0)
    assert decide(to_zero, Decision(0), load(idle=99.0), NOW) == Decision(0)
    assert decide(to_zero, Decision(0), load(idle=None, complete=False), NOW) == Decision(0)
    assert decide(to_zero, Decision(0), load(held=1, idle=0.0), NOW) == Decision(1)
    assert decide(to_zero, Decision(0), load(held=1, idle=None, complete=False), NOW) == Decision(1)
    assert decide(to_zero, Decision(1), load(held=3), NOW) == Decision(1)


def test_only_a_model_that_every_frontend_reports_as_idle_goes_to_zero() -> None:
    to_zero = settings(minReplicas=0)
    assert decide(to_zero, Decision(1), load(0, idle=59.9), NOW) == Decision(1)
    assert decide(to_zero, Decision(1), load(0, idle=None), NOW) == Decision(1)
    assert decide(to_zero, Decision(1), load(0, idle=99.0, complete=False), NOW) == Decision(1)
    assert decide(to_zero, Decision(1), load(0, idle=99.0, held=1), NOW) == Decision(1)
    assert decide(to_zero, Decision(3), load(0, idle=60.0), NOW) == Decision(0)
    assert decide(settings(), Decision(1), load(0, idle=60.0), NOW) == Decision(1), "minReplicas is 1"


def test_the_next_decision_is_due_when_a_delay_ends() -> None:
    to_zero = settings(minReplicas=0)
    assert look_again_after(to_zero, Decision(0), load(idle=99.0)) is None
    assert look_again_after(to_zero, Decision(1), load(1)) == timedelta(seconds=15)
    assert look_again_after(to_zero, Decision(1), load(idle=55.0)) == timedelta(seconds=5)
    assert look_again_after(to_zero, Decision(1), load(idle=99.0)) == timedelta(seconds=1)
    assert scale_down_at(to_zero, Decision(2)) is None
    assert scale_down_at(to_zero, Decision(2, 1, NOW)) == after(300)


counts = st.integers(0, 60)
parts = st.none() | st.floats(0, 3)
loads = st.builds(
    Load,
    held=st.integers(0, 3),
    replicas=st.lists(
        st.builds(ReplicaLoad, counts, queue_ms=st.none() | st.floats(0, 9000), kv_usage=parts), max_size=6
    ).map(tuple),
    idle_seconds=st.none() | st.floats(0, 200),
    complete=st.booleans(),
)
targets = st.sampled_from([{"runningPerReplica": 4}, {"queueTimeMs": 500}, {"kvCacheUsage": 80}])


@st.composite
def all_settings(draw: st.DrawFn) -> Autoscaling:
    least = draw(st.integers(0, 4))
    most = draw(st.integers(max(least, 1), 8))
    delay = draw(st.sampled_from([0, 30, 300]))
    return settings(draw(targets), minReplicas=least, maxReplicas=most, scaleDownDelaySeconds=delay)


@given(all_settings(), st.integers(0, 12), st.lists(st.tuples(loads, st.integers(0, 60)), max_size=30))
def test_any_sequence_of_loads(scaling: Autoscaling, existing: int, steps: list[tuple[Load, int]]) -> None:
    now, decision = NOW, Decision(existing)
    # Since this time all loads were known and asked for fewer replicas.
    fewer_since: datetime | None = None
    for observed, seconds in steps:
        now += timedelta(seconds=seconds)
        before = min(max(decision.target, scaling.min_replicas), scaling.max_replicas)
        decision = decide(scaling, decision, observed, now)
        assert scaling.min_replicas <= decision.target <= scaling.max_replicas
        assert (decision.fewer is None) == (decision.fewer_since is None)
        assert decision.fewer is None or 0 < decision.fewer < decision.target
        if decision.target == 0 and before > 0:
            assert observed.complete and not observed.held
            assert observed.idle_seconds is not None and observed.idle_seconds >= scaling.idle_seconds_to_zero
        elif decision.target < before:
            assert observed.complete, "an unknown load removes nothing"
            since = now if fewer_since is None else fewer_since
            assert now - since >= timedelta(seconds=scaling.scale_down_delay_seconds)
        if observed.held and scaling.max_replicas:
            assert decision.target > 0
        if decision.target != before or not observed.complete or decision.fewer is None:
            fewer_since = None
        elif fewer_since is None:
            fewer_since = now


@given(all_settings(), st.integers(0, 8), loads)
def test_a_constant_load_never_makes_the_number_go_up_and_down(
    scaling: Autoscaling, existing: int, observed: Load
) -> None:
    now, decision, changes = NOW, Decision(existing), []
    for _ in range(40):
        target = decision.target
        decision = decide(scaling, decision, observed, now)
        if decision.target != target:
            changes.append(decision.target - target)
        now += timedelta(seconds=100)
    limited = changes[1:]
    assert all(change > 0 for change in limited) or all(change < 0 for change in limited), changes
