"""Models with spec.autoscaling: the decision in the status, and a model at zero."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest

from minisgl_operator.api.objects import Ref
from minisgl_operator.facts.facts import Facts
from minisgl_operator.facts.observed import Unreachable
from minisgl_operator.facts.silent_frontends import next_left_out
from minisgl_operator.facts.wanted import is_at_zero, takes_requests
from minisgl_operator.plan.plan import Delete, plan
from minisgl_operator.status.status import derive_status
from support.cluster.inference_models import CLAIM, DEFAULTS, raw_model
from support.cluster.scene import NOW, Scene

AUTOSCALING = {"minReplicas": 0, "maxReplicas": 4, "target": {"runningPerReplica": 4}, "idleSecondsToZero": 60}


def scaled(replicas: int, **fields: Any) -> Scene:
    """A model whose replicas are ready; the autoscaler has decided nothing yet."""
    scene = Scene({"autoscaling": AUTOSCALING | fields | {"minReplicas": replicas}}, source=CLAIM)
    scene.raw["spec"]["autoscaling"]["minReplicas"] = fields.get("minReplicas", 0)
    scene.model = scene.model.parse(scene.raw)
    return scene


def report(scene: Scene, *, held: int = 0, idle: float | None = 0.0, requests: int = 0) -> None:
    scene.frontends_report()
    entries = [
        {**entry, "running": requests, "waiting": 0}
        for entry in scene.reports["frontend-0"]["replicas"]  # type: ignore[index]
    ]
    scene.reports["frontend-0"] = {
        **scene.reports["frontend-0"],  # type: ignore[dict-item]
        "replicas": entries,
        "held": held,
        "running": requests,
        "idle_seconds": idle,
    }


def facts_of(scene: Scene) -> Facts:
    return Facts(scene.model, scene.observed(), DEFAULTS, NOW)


def test_a_model_continues_with_the_replicas_that_it_has() -> None:
    scene = scaled(3)
    report(scene, requests=1)
    assert scene.status()["autoscaling"] == {
        "targetReplicas": 3,
        "fewerReplicas": 1,
        "fewerSince": "2026-01-01T12:00:00Z",
    }
    assert facts_of(scene).wanted == 3


def test_the_last_decision_counts_and_not_spec_replicas() -> None:
    scene = scaled(3)
    report(scene, requests=4)
    scene.raw["spec"]["replicas"] = 1
    scene.raw["status"] = {
        "autoscaling": {"targetReplicas": 2, "fewerReplicas": 1, "fewerSince": "2026-01-01T11:00:00Z"}
    }
    assert facts_of(scene).wanted == 3, "12 requests need 3"
    report(scene, requests=0)
    assert facts_of(scene).wanted == 1
    scene.reports = {}
    assert facts_of(scene).wanted == 2, "unknown"


def test_a_frontend_that_has_not_started_has_no_requests_and_one_that_does_not_answer_may_have() -> None:
    scene = scaled(1)
    report(scene, idle=99.0)
    assert facts_of(scene).wanted == 0
    scene.pods["frontend-1"] = copy.deepcopy(scene.pods["frontend-0"])
    scene.pods["frontend-1"]["metadata"]["uid"] = "Pod/frontend-1"
    assert facts_of(scene).wanted == 1
    scene.waiting("frontend-1", "ContainerCreating")
    assert facts_of(scene).wanted == 0


@pytest.mark.parametrize("idle", [True, False])
def test_a_frontend_that_stays_silent_lets_the_others_decide_in_the_end(idle: bool) -> None:
    scene = scaled(3, minReplicas=0 if idle else 1)
    report(scene, idle=700.0)
    scene.pods["frontend-1"] = copy.deepcopy(scene.pods["frontend-0"])
    scene.pods["frontend-1"]["metadata"] |= {"name": "frontend-1", "uid": "Pod/frontend-1"}
    scene.reports["frontend-1"] = Unreachable("timed out")
    wanted = []
    for minutes in (0, 9, 10, 16):
        facts = Facts(scene.model, scene.observed(), DEFAULTS, NOW + timedelta(minutes=minutes))
        left_out = next_left_out(facts.silent_frontends, facts.now)
        assert left_out == (NOW + timedelta(minutes=10) if minutes < 10 else None)
        scene.raw["status"] = derive_status(facts, scene.raw.get("status", {}))
        wanted.append(scene.raw["status"]["autoscaling"]["targetReplicas"])
        assert scene.raw["status"]["frontend"]["silent"] == [{"pod": "frontend-1", "since": "2026-01-01T12:00:00Z"}]
        degraded = scene.raw["status"]["conditions"][7]
        assert (degraded["type"], degraded["reason"] == "FrontendSilent") == ("Degraded", minutes >= 10)
    assert wanted == ([3, 3, 0, 0] if idle else [3, 3, 3, 1])
    assert "frontend-1" in degraded["message"]
    scene.reports["frontend-1"] = scene.reports["frontend-0"]
    answered = derive_status(facts_of(scene), scene.raw["status"])
    assert "silent" not in answered["frontend"]


def test_frontends_that_are_all_silent_remove_nothing() -> None:
    scene = scaled(3)
    scene.reports["frontend-0"] = Unreachable("timed out")
    silent = [{"pod": "frontend-0", "since": "2026-01-01T10:00:00Z"}]
    scene.raw["status"] = {"autoscaling": {"targetReplicas": 3}, "frontend": {"silent": silent}}
    assert facts_of(scene).wanted == 3


def test_an_idle_model_loses_its_replicas_and_reports_why() -> None:
    scene = scaled(1)
    report(scene, idle=60.0)
    deleted = {step.ref for step in plan(facts_of(scene)) if isinstance(step, Delete)}
    assert Ref("StatefulSet", "qwen-r0") in deleted
    del scene.children[Ref("StatefulSet", "qwen-r0")], scene.children[Ref("Service", "qwen-r0")]
    scene.no_pods("qwen-r")
    scene.raw["status"] = {"autoscaling": {"targetReplicas": 0}}
    report(scene, idle=60.0)
    status = scene.status()
    conditions = {each["type"]: (each["status"], each["reason"]) for each in status["conditions"]}
    assert conditions["Ready"] == ("True", "ScaledToZero")
    assert (status["phase"], status["autoscaling"]) == ("Idle", {"targetReplicas": 0})
    assert facts_of(scene).next_look is None
    report(scene, held=1)
    assert facts_of(scene).wanted == 1
    assert scene.status()["phase"] == "Starting"
    assert facts_of(scene).next_look == NOW + timedelta(seconds=15)


def test_a_suspended_model_keeps_its_decision() -> None:
    scene = scaled(2, minReplicas=1)
    scene.raw["spec"]["suspend"] = True
    scene.raw["status"] = {"autoscaling": {"targetReplicas": 2}}
    scene.model = scene.model.parse(scene.raw)
    facts = facts_of(scene)
    assert (facts.wanted, facts.scale_down_at, facts.next_look) == (0, None, None)
    assert scene.status()["autoscaling"] == {"targetReplicas": 2}
    assert scene.status()["phase"] == "Suspended"


def test_a_restart_of_the_operator_starts_the_delay_of_a_scale_down_again() -> None:
    scene = scaled(3)
    scene.reports = {}
    previous = {"autoscaling": {"targetReplicas": 3, "fewerReplicas": 1, "fewerSince": "2026-01-01T11:59:00Z"}}
    scene.raw["status"] = previous
    later = Facts(scene.model, scene.observed(), DEFAULTS, NOW + timedelta(hours=1))
    assert derive_status(later, previous) == {"autoscaling": {"targetReplicas": 3}}


@pytest.mark.parametrize(
    ("spec", "takes"),
    [
        ({}, True),
        ({"replicas": 2}, True),
        ({"replicas": 0}, False),
        ({"suspend": True}, False),
        ({"replicas": 0, "autoscaling": AUTOSCALING}, True),
        ({"suspend": True, "autoscaling": AUTOSCALING}, False),
    ],
)
def test_a_model_that_no_request_starts_takes_none(spec: dict[str, Any], takes: bool) -> None:
    assert takes_requests(raw_model(spec)) is takes


def test_only_an_autoscaled_model_without_replicas_is_at_zero() -> None:
    def model(spec: dict[str, Any], target: int | None) -> dict[str, Any]:
        return raw_model(spec) | {"status": {} if target is None else {"autoscaling": {"targetReplicas": target}}}

    assert is_at_zero(model({"autoscaling": AUTOSCALING}, 0))
    assert not is_at_zero(model({"autoscaling": AUTOSCALING}, 1))
    assert not is_at_zero(model({"autoscaling": AUTOSCALING}, None))
    assert not is_at_zero(model({"autoscaling": AUTOSCALING, "suspend": True}, 0))
    assert not is_at_zero(model({"replicas": 0}, 0))
