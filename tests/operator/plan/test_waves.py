"""Upgrades of the operator in waves."""

from __future__ import annotations

import copy
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from minisgl_operator.api.upgrades import UpgradeSettings, UpgradeWindow
from minisgl_operator.facts.rollout.waves import Decision, Key, Member, State, decide
from support.cluster.fleet import WAVES, Fleet, FleetModel, operator_version

STATES: tuple[State, ...] = ("Current", "Waiting", "Excluded", "Upgrading", "Upgraded", "Failed")
members = st.dictionaries(
    st.tuples(st.just("team-a"), st.text("abcdef", min_size=1, max_size=2)),
    st.builds(Member, st.integers(0, 3), st.sampled_from(STATES)),
    max_size=20,
)


# The decision for all models.


@given(members=members, max_models=st.integers(1, 5), is_open=st.booleans())
def test_only_waiting_models_of_the_first_wave_that_is_not_done_may_begin(
    members: dict[Key, Member], max_models: int, is_open: bool
) -> None:
    found = decide(members, max_models, is_open)
    upgrading = [key for key, each in members.items() if each.state == "Upgrading"]
    if found.admitted:
        assert is_open and all(each.state != "Failed" for each in members.values())
        assert len(found.admitted) + len(upgrading) <= max_models
    for key in found.admitted:
        assert members[key].state == "Waiting"
        earlier = [each for each in members.values() if each.wave < members[key].wave]
        assert all(each.state in ("Current", "Excluded", "Upgraded") for each in earlier)


@given(members=members, max_models=st.integers(1, 5))
def test_an_upgrade_goes_on_until_no_model_waits(members: dict[Key, Member], max_models: int) -> None:
    members = {key: each for key, each in members.items() if each.state != "Failed"}
    for _ in range(2 * len(members) + 1):
        for key in decide(members, max_models).admitted:
            members[key] = Member(members[key].wave, "Upgrading")
        done = min((key for key, each in members.items() if each.state == "Upgrading"), default=None)
        if done is not None:
            members[done] = Member(members[done].wave, "Upgraded")
    assert not [each for each in members.values() if each.state in ("Waiting", "Upgrading")]
    assert decide(members, max_models) == Decision()


def test_a_failed_model_stops_all_and_is_named() -> None:
    a, b = ("team", "a"), ("team", "b")
    found = decide({a: Member(0, "Waiting"), b: Member(1, "Failed")}, 5)
    assert found == Decision(wave=0, failed=b)


# Windows.


def test_a_window_is_open_on_its_days_and_in_its_hours() -> None:
    window = UpgradeWindow.model_validate({"days": ["Friday"], "startHour": 22, "endHour": 4})
    friday = datetime(2026, 1, 2, tzinfo=UTC)
    open_at = [hour for hour in range(72) if window.is_open(friday + timedelta(hours=hour))]
    assert open_at == [22, 23, 24, 25, 26, 27]
    assert window.opens_after(friday) == timedelta(hours=22)
    assert window.opens_after(friday + timedelta(hours=28)) == timedelta(days=6, hours=18)
    assert UpgradeWindow().is_open(friday)


@given(
    days=st.sets(st.sampled_from(["Monday", "Thursday", "Sunday"]), min_size=1),
    start=st.integers(0, 23),
    end=st.integers(1, 24),
    minutes=st.integers(0, 14 * 24 * 60),
)
def test_a_closed_window_opens_at_the_given_time_and_not_before(
    days: set[str], start: int, end: int, minutes: int
) -> None:
    window = UpgradeWindow.model_validate({"days": sorted(days), "startHour": start, "endHour": end})
    now = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=minutes)
    if not window.is_open(now):
        after = window.opens_after(now)
        assert window.is_open(now + after)
        assert not window.is_open(now + after - timedelta(minutes=1))


@pytest.mark.parametrize(
    ("rollout", "error"),
    [
        ({"maxModels": 0}, "maxModels"),
        ({"waves": [{"name": "others", "selector": {}}]}, "another name"),
        ({"waves": [*WAVES, *WAVES]}, "Duplicate"),
        ({"waves": [{"name": "a"}]}, "selector"),
        ({"waves": [{"name": "a", "selector": {"matchExpressions": [{"key": "a", "operator": "In"}]}}]}, "at least"),
        ({"window": {"days": []}}, "days"),
        ({"window": {"days": ["Mon"]}}, "days"),
        ({"window": {"startHour": 24}}, "startHour"),
    ],
)
def test_wrong_settings_are_rejected(rollout: dict[str, Any], error: str) -> None:
    with pytest.raises(ValidationError, match=error):
        UpgradeSettings.model_validate(rollout)


@pytest.mark.parametrize(
    ("requirement", "selected"),
    [
        ({"key": "stage", "operator": "In", "values": ["a", "b"]}, {"a", "b"}),
        ({"key": "stage", "operator": "NotIn", "values": ["a"]}, {"b", "c", ""}),
        ({"key": "stage", "operator": "Exists"}, {"a", "b", "c"}),
        ({"key": "stage", "operator": "DoesNotExist"}, {""}),
    ],
)
def test_a_wave_selects_by_expressions(requirement: dict[str, Any], selected: set[str]) -> None:
    given = UpgradeSettings.model_validate({"waves": [{"name": "a", "selector": {"matchExpressions": [requirement]}}]})
    labels = {stage: {"stage": stage} if stage else {} for stage in ("a", "b", "c", "")}
    assert {stage for stage, each in labels.items() if given.wave_of(each) == 0} == selected


# Whole models.


def fleet(count: int, *, canaries: int = 1, replicas: int = 1, rollout: dict[str, Any] | None = None) -> Fleet:
    """Models of version 1 that serve, of which the last ones by name are the first wave."""
    names = [chr(ord("a") + number) for number in range(count)]
    models = []
    for number, name in enumerate(names):
        spec = {"replicas": replicas, "rollout": rollout or {}}
        stage = "canary" if number >= count - canaries else "other"
        models.append(FleetModel(name, stage, spec, operator_version(1)))
    made = Fleet(models)
    made.settle()
    assert all(model.is_done for model in made.models.values())
    return made


def versions(model: FleetModel) -> set[str]:
    return {pod["spec"]["containers"][0]["image"] for pod in model.pods.values()}


def test_models_are_upgraded_in_their_waves_and_status_shows_it() -> None:
    made = fleet(3)
    made.start_operator(operator_version(2, waves=WAVES))
    a, b, c = made.models.values()
    for model in (a, b, c):
        made.reconcile(model)
    assert [model.state for model in (a, b, c)] == ["Waiting", "Waiting", "Upgrading"]
    made.reconcile(a)
    assert a.progressing["reason"] == "UpgradeWaiting"
    assert a.progressing["message"] == (
        "The model keeps its version: wave others begins when all models of wave canary serve the new version."
    )
    assert not any(model.has_new_frontends for model in (a, b, c)), "the status is written first"
    made.reconcile(c)
    assert not a.has_new_frontends and not b.has_new_frontends and c.has_new_frontends
    for _ in range(20):
        made.run(c)
        made.reconcile(c)
    assert c.is_done and c.state == "Upgraded"
    assert a.key in made.queued and b.key in made.queued, "they are told"
    made.reconcile(b)
    assert b.progressing["message"].endswith("it waits for its turn in wave others.")
    assert not b.has_new_frontends
    made.settle()
    assert all(model.is_done and versions(model) == {"engine:2"} for model in made.models.values())
    assert c.progressing["reason"] == "UpToDate"


def test_without_settings_all_models_are_upgraded_at_once() -> None:
    made = fleet(2)
    made.start_operator(operator_version(2))
    for model in made.models.values():
        made.reconcile(model)
    assert all(model.has_new_frontends for model in made.models.values())
    assert all("upgrade" not in model.raw["status"]["rollout"] for model in made.models.values())


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), max_models=st.integers(1, 3), strategy=st.sampled_from(["Surge", "Recreate"]))
def test_waves_hold_whatever_happens_in_which_order(seed: int, max_models: int, strategy: str) -> None:
    order = Random(seed)
    made = fleet(5, canaries=2, replicas=order.choice((1, 2)), rollout={"strategy": strategy})
    new = operator_version(2, waves=WAVES, maxModels=max_models)
    made.start_operator(new)
    edited: set[str] = set()
    for _ in range(150):
        model = order.choice(list(made.models.values()))
        match order.randrange(20):
            case 0 if len(edited) < 2:
                model.edit({"engine": {"env": [{"name": "A", "value": str(order.random())}]}})
                edited.add(model.key.name)
                made.reconcile(model)
                assert model.has_new_frontends, "a user's edit is never held back"
            case 1:
                made.start_operator(new)
            case 2:
                model.look()
                for step in model.plan()[: order.randrange(4)]:
                    model.send(step)
            case number if number < 12:
                made.reconcile(model)
            case _:
                made.run(model)
        check(made, edited, max_models)
    made.settle()
    assert all(model.is_done for model in made.models.values())


def check(made: Fleet, edited: set[str], max_models: int) -> None:
    by_waves = [model for name, model in made.models.items() if name not in edited]
    begun = [model for model in by_waves if model.has_new_frontends or model.has_new_engines]
    assert sum(not model.is_done for model in begun) <= max_models
    canaries = [model for model in by_waves if model.raw["metadata"]["labels"]["stage"] == "canary"]
    if any(model not in canaries for model in begun):
        assert all(model.has_new_frontends and model.has_new_engines for model in canaries)
    assert all(model.has_new_frontends for model in begun), "frontends before engines"


def test_an_edit_takes_the_new_version_at_once_and_a_scale_does_not() -> None:
    made = fleet(3)
    made.start_operator(operator_version(2, waves=WAVES))
    a, b, c = made.models.values()
    c.broken = {"engine:2"}
    made.settle()
    assert c.state == "Failed" and versions(a) == {"engine:1"}
    super(FleetModel, a).edit({"replicas": 2})
    b.edit({"drainSeconds": 77})
    made.settle()
    assert versions(a) == {"engine:1"} and len(a.routed()) == 2
    assert versions(b) == {"engine:2"} and b.has_new_frontends and b.state == "Current"


def test_a_model_that_fails_stops_the_waves_until_it_is_left_out() -> None:
    made = fleet(2)
    made.start_operator(operator_version(2, waves=WAVES))
    a, canary = made.models.values()
    canary.broken = {"engine:2"}
    made.settle()
    assert versions(canary) == {"engine:1"}, "it is rolled back"
    assert canary.progressing["reason"] == "UpgradeFailed"
    assert "has failed" in canary.progressing["message"] and "spec.rollout.upgrade" in canary.progressing["message"]
    assert a.progressing["reason"] == "UpgradeWaiting"
    assert "that of team-a/b failed" in a.progressing["message"]
    made.start_operator(made.defaults)
    made.settle()
    assert versions(a) == {"engine:1"}, "also after a restart"
    super(FleetModel, canary).edit({"rollout": {"upgrade": "Never"}})
    made.settle()
    assert versions(a) == {"engine:2"}
    assert versions(canary) == {"engine:1"}


def test_frontends_that_do_not_become_ready_stop_the_waves_before_any_engine() -> None:
    made = fleet(2)
    made.start_operator(operator_version(2, waves=WAVES))
    a, canary = made.models.values()
    canary.broken = {"frontend:2"}
    made.settle()
    assert canary.state == "Failed" and canary.has_new_frontends and not canary.has_new_engines
    assert not a.has_new_frontends


def test_a_version_with_a_correction_reaches_the_failed_model_first() -> None:
    made = fleet(3, canaries=1)
    made.start_operator(operator_version(2, waves=WAVES))
    a, b, canary = made.models.values()
    canary.broken = {"engine:2"}
    made.settle()
    made.start_operator(operator_version(3, waves=WAVES))
    for model in (a, b, canary):
        made.reconcile(model)
    assert canary.state == "Upgrading"
    made.settle()
    assert {image for model in (a, b, canary) for image in versions(model)} == {"engine:3"}


def test_models_that_do_not_serve_are_not_waited_for() -> None:
    made = fleet(4, canaries=3)
    a, suspended, failing, paused = made.models.values()
    suspended.edit({"suspend": True})
    paused.edit({"rollout": {"paused": True}})
    failing.broken = {"engine:1"}
    made.settle()
    made.start_operator(operator_version(2, waves=WAVES))
    made.settle()
    assert versions(a) == {"engine:2"}
    assert versions(failing) == {"engine:1"}
    assert [model.state for model in (suspended, failing, paused)] == ["Current", "Excluded", "Excluded"]
    failing.broken = set()
    paused.edit({"rollout": {}})
    suspended.edit({"suspend": False})
    made.settle()
    assert all(versions(model) == {"engine:2"} for model in made.models.values())


BUSY: dict[str, Any] = {"held": 0, "idle_seconds": 0.0}
IDLE: dict[str, Any] = {"held": 0, "idle_seconds": 99.0}
WAKING: dict[str, Any] = {"held": 1, "idle_seconds": 0.0}


def fleet_with_autoscaled_canary() -> tuple[Fleet, FleetModel, FleetModel]:
    """Two models of version 1 under an operator of version 2; the canary goes to zero when it is idle."""
    made = fleet(2)
    a, canary = made.models.values()
    super(FleetModel, canary).edit(
        {
            "autoscaling": {
                "minReplicas": 0,
                "maxReplicas": 1,
                "idleSecondsToZero": 60,
                "target": {"runningPerReplica": 4},
            }
        }
    )
    canary.load = BUSY
    made.settle()
    made.start_operator(operator_version(2, waves=WAVES))
    for model in (a, canary):
        made.reconcile(model)
    assert (a.state, canary.state) == ("Waiting", "Upgrading")
    return made, a, canary


def run_alone(made: Fleet, model: FleetModel, rounds: int = 20) -> None:
    for _ in range(rounds):
        made.reconcile(model)
        made.run(model)


def test_an_upgraded_model_that_goes_to_zero_is_not_waited_for() -> None:
    made, a, canary = fleet_with_autoscaled_canary()
    run_alone(made, canary)
    assert canary.is_done and canary.state == "Upgraded"
    canary.load = IDLE
    run_alone(made, canary)
    assert not canary.pods and canary.state == "Upgraded"
    made.settle()
    assert a.is_done and versions(a) == {"engine:2"}


def test_a_model_that_goes_to_zero_in_its_turn_is_not_waited_for_and_starts_with_the_new_version() -> None:
    made, a, canary = fleet_with_autoscaled_canary()
    made.reconcile(canary)
    assert canary.has_new_frontends and not canary.has_new_engines
    canary.load = IDLE
    made.settle()
    assert not canary.pods and canary.state == "Upgraded"
    assert a.is_done and versions(a) == {"engine:2"}
    canary.load = WAKING
    run_alone(made, canary)
    assert canary.is_done and canary.state == "Upgraded"


def test_a_model_that_goes_to_zero_in_its_turn_keeps_it_while_a_frontend_is_not_ready() -> None:
    made, _, canary = fleet_with_autoscaled_canary()
    made.reconcile(canary)
    canary.load = IDLE
    run_alone(made, canary)
    assert not canary.pods and canary.state == "Upgraded"
    canary.frontends["status"]["readyReplicas"] = 0
    canary.look()
    for _ in range(3):
        made.reconcile(canary)
        assert canary.state == "Upgraded"
    canary.load = WAKING
    run_alone(made, canary)
    assert canary.is_done and canary.state == "Upgraded"
    assert versions(canary) == {"engine:2"}


def test_going_to_zero_does_not_hide_that_the_new_engines_have_failed() -> None:
    made, a, canary = fleet_with_autoscaled_canary()
    run_alone(made, canary)
    assert canary.is_done and canary.state == "Upgraded"
    canary.broken = {"engine:2"}
    canary.pods.clear()
    run_alone(made, canary)
    assert canary.state == "Failed"
    canary.load = IDLE
    made.settle()
    assert not canary.pods and canary.state == "Failed"
    assert versions(a) == {"engine:1"}
    canary.broken = {"none"}
    canary.load = WAKING
    made.settle()
    assert canary.state == "Upgraded"
    assert versions(a) == {"engine:2"}


def test_a_model_at_zero_whose_new_engines_fail_at_the_next_request_stops_the_waves() -> None:
    made, a, canary = fleet_with_autoscaled_canary()
    canary.broken = {"engine:2"}
    made.reconcile(canary)
    canary.load = IDLE
    run_alone(made, canary)
    assert not canary.pods and canary.state == "Upgraded"
    canary.load = WAKING
    run_alone(made, canary)
    assert canary.state == "Failed"
    made.settle()
    assert versions(a) == {"engine:1"}


@pytest.mark.parametrize(("upgrade", "image"), [("Immediate", "engine:2"), ("Never", "engine:1")])
def test_a_model_opts_out_of_waves(upgrade: str, image: str) -> None:
    made = fleet(2, canaries=0)
    a, b = made.models.values()
    a.broken = b.broken = {"none"}
    super(FleetModel, b).edit({"rollout": {"upgrade": upgrade}})
    made.settle()
    made.start_operator(operator_version(2, waves=WAVES))
    made.reconcile(b)
    made.reconcile(a)
    assert b.has_new_frontends == (upgrade == "Immediate")
    made.settle()
    assert (versions(a), versions(b)) == ({"engine:2"}, {image})
    b.edit({"drainSeconds": 77})
    made.settle()
    assert versions(b) == {"engine:2"}, "an edit takes the new version"


def test_never_holds_also_without_waves() -> None:
    made = fleet(1, rollout={"upgrade": "Never"})
    made.start_operator(operator_version(2))
    made.settle()
    [model] = made.models.values()
    assert versions(model) == {"engine:1"} and not model.has_new_frontends


def test_upgrades_begin_only_in_the_window() -> None:
    made = fleet(1)
    [model] = made.models.values()
    model.now = datetime(2026, 1, 1, 12, tzinfo=UTC)
    made.start_operator(operator_version(2, window={"startHour": 22, "endHour": 23}))
    made.settle()
    assert versions(model) == {"engine:1"}
    assert "window" in model.progressing["message"]
    assert model.turn is not None and model.turn.opens_at == datetime(2026, 1, 1, 22, tzinfo=UTC)
    model.now = model.turn.opens_at
    made.settle()
    assert versions(model) == {"engine:2"}


@pytest.mark.parametrize("reconciles", [1, 2, 3])
def test_an_operator_that_stops_in_the_middle_leaves_no_model_half_way(reconciles: int) -> None:
    """It stops after it has written children, and before their status; then the window closes."""
    made = fleet(1)
    [model] = made.models.values()
    model.now = datetime(2026, 1, 1, 22, 59, tzinfo=UTC)
    settings = operator_version(2, window={"startHour": 22, "endHour": 23})
    made.start_operator(settings)
    for _ in range(reconciles):
        before = copy.deepcopy(model.raw["status"])
        made.reconcile(model)
        made.run(model)
    model.raw["status"] = before
    made.start_operator(settings)
    model.now = datetime(2026, 1, 1, 23, tzinfo=UTC)
    made.settle()
    assert versions(model) == ({"engine:2"} if model.has_new_frontends else {"engine:1"})
    assert reconciles == 1 or model.is_done


def test_an_upgrade_that_has_begun_goes_on_after_the_window() -> None:
    made = fleet(2, canaries=0)
    made.start_operator(operator_version(2, window={"startHour": 22, "endHour": 23}))
    a, b = made.models.values()
    a.now = b.now = datetime(2026, 1, 1, 22, 59, tzinfo=UTC)
    for model in (a, b, a, a):
        made.reconcile(model)
    assert a.has_new_frontends and not a.has_new_engines
    a.now = b.now = datetime(2026, 1, 1, 23, tzinfo=UTC)
    made.settle()
    assert (versions(a), versions(b)) == ({"engine:2"}, {"engine:1"})
    assert b.turn is not None and b.turn.opens_at == datetime(2026, 1, 2, 22, tzinfo=UTC)


def test_a_rollback_in_the_middle_takes_back_upgraded_models_in_waves_and_leaves_the_others() -> None:
    made = fleet(3, canaries=2)
    made.start_operator(operator_version(1, waves=WAVES))
    made.settle()
    made.start_operator(operator_version(2, waves=WAVES))
    a, done, begun = made.models.values()
    for _ in range(20):
        for model in (a, begun, done):
            made.reconcile(model)
        made.run(done)
    assert done.state == "Upgraded" and begun.has_new_frontends and not begun.has_new_engines
    made.start_operator(operator_version(1, waves=WAVES))
    uids = a.uids()
    for model in (a, done, begun):
        made.reconcile(model)
    assert begun.has_new_frontends, "an upgrade in progress turns back at once"
    assert done.state == "Waiting" and versions(done) == {"engine:2"}, "its pods stay until its turn"
    made.settle()
    assert all(versions(model) == {"engine:1"} and model.is_done for model in (a, done, begun))
    assert a.uids() == uids


def test_a_model_that_is_created_meanwhile_has_the_new_version_and_takes_no_turn() -> None:
    made = fleet(2)
    made.start_operator(operator_version(2, waves=WAVES))
    a, canary = made.models.values()
    canary.broken = {"engine:2"}
    made.settle()
    new = FleetModel("z", "other", {"replicas": 1}, made.defaults)
    made.create(new)
    made.settle()
    assert new.is_done and new.state == "Current"
    assert a.state == "Waiting"


@pytest.mark.parametrize("broken", [True, False], ids=["failed", "in progress"])
def test_the_others_go_on_when_a_model_is_deleted_in_its_turn(broken: bool) -> None:
    made = fleet(2)
    made.start_operator(operator_version(2, waves=WAVES))
    a, canary = made.models.values()
    if broken:
        canary.broken = {"engine:2"}
        made.settle()
    else:
        for model in (a, canary, canary):
            made.reconcile(model)
    assert canary.has_new_frontends and not a.has_new_frontends
    made.delete(canary)
    assert a.key in made.queued
    made.settle()
    assert versions(a) == {"engine:2"}
