"""A model that has no frontends at zero: the gateway takes their place, and gives it back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.wire.gateway import GatewayStatus, ModelDemand
from minisgl_operator.api.defaults import ModelDefaults
from minisgl_operator.api.objects import Manifest, Ref
from minisgl_operator.facts.facts import Facts
from minisgl_operator.facts.gateway import Demand, demand_of
from minisgl_operator.facts.observed import GatewayPod
from minisgl_operator.facts.rollout.upgrade import spec_hash
from minisgl_operator.plan.plan import Apply, Delete, plan
from minisgl_operator.status.status import derive_status
from support.cluster.inference_models import CLAIM, DEFAULTS
from support.cluster.scene import NOW, Scene, with_observed

BEHIND_GATEWAY = replace(DEFAULTS, gateway="minisgl")
AUTOSCALING = {"minReplicas": 0, "maxReplicas": 4, "target": {"runningPerReplica": 4}, "idleSecondsToZero": 60}
SPEC: dict[str, Any] = {"autoscaling": AUTOSCALING, "frontend": {"minReplicas": 0}}
SLICE = Ref("EndpointSlice", "qwen-gateway")
FRONTENDS = Ref("Deployment", "qwen-frontend")


def gateway(number: int = 1, *, ready: bool = True, silent: timedelta | None = None, **model: Any) -> GatewayPod:
    """A pod of the gateway; `model` is what it reports about the model qwen."""
    status = GatewayStatus(models={"team-a/qwen": ModelDemand(**model)} if model else {})
    since = None if silent is None else NOW - silent
    return GatewayPod(f"gateway-{number}", f"10.0.0.{number}", ready, None if silent is not None else status, since)


@dataclass(frozen=True)
class Seen:
    """The frontends that a plan applies, and what it does with the EndpointSlice."""

    frontends: int | None
    applied: Manifest | None
    deleted: bool

    @property
    def addresses(self) -> list[str]:
        assert self.applied is not None
        return [endpoint["addresses"][0] for endpoint in self.applied["endpoints"]]


def facts_of(scene: Scene, *pods: GatewayPod, known: bool = True, defaults: Any = BEHIND_GATEWAY) -> Facts:
    return Facts(scene.model, with_observed(scene, gateway=pods if known else None), defaults, NOW)


def planned(facts: Facts) -> Seen:
    steps = plan(facts)
    applied = {step.ref: step.manifest for step in steps if isinstance(step, Apply)}
    count = applied[FRONTENDS]["spec"].get("replicas") if FRONTENDS in applied else None
    return Seen(count, applied.get(SLICE), any(isinstance(step, Delete) and step.ref == SLICE for step in steps))


def at_zero(spec: dict[str, Any] = SPEC, *, frontends: int = 0) -> Scene:
    """A model that has been scaled to zero, with so many frontends."""
    scene = Scene(spec, source=CLAIM)
    scene.raw["status"] = {"autoscaling": {"targetReplicas": 0}}
    scale_frontends(scene, frontends)
    return scene


def scale_frontends(scene: Scene, count: int, ready: int | None = None) -> None:
    deployment = scene.child("Deployment", "qwen-frontend")
    deployment["spec"]["replicas"] = count
    deployment["status"] = {"replicas": count, "readyReplicas": count if ready is None else ready}
    if not count:
        scene.no_pods("frontend-")


def serving() -> Scene:
    """A model with one replica."""
    scene = Scene(SPEC | {"autoscaling": AUTOSCALING | {"minReplicas": 1}}, source=CLAIM)
    scene.raw["spec"] = scene.raw["spec"] | SPEC
    scene.model = scene.model.parse(scene.raw)
    return scene


def report_idle(scene: Scene, seconds: float) -> None:
    scene.reports["frontend-0"] = {**scene.reports["frontend-0"], "idle_seconds": seconds}  # type: ignore[dict-item]


def test_frontends_leave_an_idle_model_when_the_gateway_takes_its_requests() -> None:
    scene = at_zero(frontends=1)
    seen = planned(facts_of(scene, gateway(2), gateway(1)))
    assert (seen.frontends, seen.addresses) == (0, ["10.0.0.1", "10.0.0.2"])
    assert planned(facts_of(scene)).frontends == 1, "no gateway"
    assert planned(facts_of(scene, gateway(ready=False))).frontends == 1
    assert planned(facts_of(scene, known=False)).frontends == 1


def test_the_gateway_is_led_to_before_the_last_frontend_leaves() -> None:
    refs = [step.ref for step in plan(facts_of(at_zero(frontends=1), gateway()))]
    assert refs.index(SLICE) < refs.index(FRONTENDS)


def test_an_outage_of_the_gateway_starts_no_frontends_and_is_reported() -> None:
    scene = at_zero()
    assert planned(facts_of(scene)).frontends == 0
    status = derive_status(facts_of(scene), {})
    conditions = {each["type"]: each for each in status["conditions"]}
    assert (conditions["Ready"]["status"], conditions["Ready"]["reason"]) == ("False", "GatewayUnavailable")
    assert "namespace minisgl-system" in conditions["FrontendReady"]["message"]


def test_a_gateway_that_is_not_known_yet_changes_nothing() -> None:
    scene = at_zero()
    scene.children[SLICE] = planned(facts_of(scene, gateway())).applied or {}
    scene.children[SLICE]["metadata"]["uid"] = "slice"
    seen = planned(facts_of(scene, known=False))
    assert (seen.frontends, seen.applied, seen.deleted) == (0, None, False)
    status = derive_status(facts_of(scene, known=False), {})
    assert {each["type"]: each["status"] for each in status["conditions"]}["Ready"] == "True"


def test_an_idle_model_without_frontends_is_as_it_should_be() -> None:
    status = derive_status(facts_of(at_zero(), gateway()), {})
    conditions = {each["type"]: (each["status"], each["reason"]) for each in status["conditions"]}
    assert conditions["Ready"] == ("True", "ScaledToZero")
    assert conditions["FrontendReady"] == ("True", "FrontendsReady")
    assert not {"Reconciling", "Stalled"} & conditions.keys()
    assert (status["phase"], status["frontend"]) == ("Idle", {"replicas": 0, "readyReplicas": 0})


@pytest.mark.parametrize("replicas", [None, 3])
def test_a_held_request_starts_frontends_and_a_replica(replicas: int | None) -> None:
    spec = SPEC | {"frontend": SPEC["frontend"] | ({} if replicas is None else {"replicas": replicas})}
    scene = at_zero(spec)
    facts = facts_of(scene, gateway(1), gateway(2, held=1, idle_seconds=0.0))
    seen = planned(facts)
    assert (facts.wanted, seen.frontends) == (1, replicas or 1)
    assert seen.addresses == ["10.0.0.1", "10.0.0.2"], "until a frontend is ready"
    assert derive_status(facts, {})["frontend"]["replicas"] == (replicas or 1)


def test_the_service_leaves_the_gateway_once_a_frontend_is_ready() -> None:
    scene = serving()
    scale_frontends(scene, 1, ready=0)
    before = planned(facts_of(scene, gateway()))
    assert before.addresses == ["10.0.0.1"]
    scene.children[SLICE] = (before.applied or {}) | {"metadata": (before.applied or {})["metadata"] | {"uid": "slice"}}
    scale_frontends(scene, 1)
    after = planned(facts_of(scene, gateway()))
    assert (after.applied, after.deleted, after.frontends) == (None, True, 1)


def test_idle_is_what_frontends_and_gateways_call_idle() -> None:
    scene = serving()
    report_idle(scene, 99.0)
    assert facts_of(scene, gateway(), gateway(2, idle_seconds=70.0)).wanted == 0
    assert facts_of(scene, gateway(), gateway(2, idle_seconds=5.0)).wanted == 1
    assert facts_of(scene, gateway(), gateway(2, held=1)).wanted == 1
    assert facts_of(scene, gateway(), gateway(2, silent=timedelta(minutes=9))).wanted == 1, "it may hold one"
    assert facts_of(scene, gateway(), gateway(2, silent=timedelta(minutes=10))).wanted == 0


def test_a_model_with_frontends_at_zero_needs_no_answer_of_the_gateway_and_hears_of_its_requests() -> None:
    scene = serving()
    scene.raw["spec"] = scene.raw["spec"] | {"frontend": {"minReplicas": 1}}
    scene.model = scene.model.parse(scene.raw)
    report_idle(scene, 99.0)
    assert facts_of(scene, gateway(silent=timedelta(0))).wanted == 0
    assert facts_of(scene, gateway(held=1)).wanted == 1


@pytest.mark.parametrize(
    ("own", "default", "with_gateway", "relies"),
    [
        (0, 1, True, True),
        (None, 0, True, True),
        (1, 0, True, False),
        (None, 1, True, False),
        (0, 0, False, False),
    ],
)
def test_the_model_s_field_comes_before_the_default(
    own: int | None, default: int, with_gateway: bool, relies: bool
) -> None:
    scene = at_zero({"autoscaling": AUTOSCALING, "frontend": {} if own is None else {"minReplicas": own}}, frontends=1)
    models = ModelDefaults.model_validate({"frontend": {"minReplicas": default}})
    defaults = replace(BEHIND_GATEWAY if with_gateway else DEFAULTS, models=models)
    seen = planned(facts_of(scene, gateway(), defaults=defaults))
    assert (seen.frontends, seen.applied is not None) == ((0, True) if relies else (1, False))


def test_the_number_of_frontends_of_an_autoscaler_ends_at_zero_and_begins_with_one() -> None:
    scene = at_zero(frontends=3)
    owner = {"manager": "kube-controller-manager", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    scene.child("Deployment", "qwen-frontend")["metadata"]["managedFields"] = [owner]
    assert planned(facts_of(scene, gateway())).frontends == 0
    scene = at_zero()
    assert planned(facts_of(scene, gateway(held=1))).frontends == 1


def test_frontends_that_wait_for_an_upgrade_go_to_zero_and_wake_all_the_same() -> None:
    def waiting(scene: Scene) -> Scene:
        scene.raw["status"]["rollout"] = {"upgrade": {"specHash": spec_hash(scene.model)}}
        scene.child("Deployment", "qwen-frontend")["metadata"]["labels"]["serving.minisgl.io/revision"] = "old"
        return scene

    spec = SPEC | {"rollout": {"upgrade": "Never"}}
    busy = waiting(at_zero(spec | {"frontend": {"minReplicas": 1}}, frontends=1))
    assert facts_of(busy, gateway()).keeps_frontends
    assert planned(facts_of(waiting(at_zero(spec, frontends=1)), gateway())).frontends == 0
    assert planned(facts_of(waiting(at_zero(spec)), gateway(held=1))).frontends == 1


def test_the_number_at_zero_is_no_edit_of_pods() -> None:
    hashes = {spec_hash(Scene({"frontend": frontend}).model) for frontend in ({}, {"minReplicas": 0})}
    assert len(hashes) == 1


def test_a_suspended_model_is_not_led_to_the_gateway() -> None:
    scene = at_zero(SPEC | {"suspend": True})
    assert planned(facts_of(scene, gateway())).applied is None


def test_a_model_that_no_gateway_has_seen_has_no_requests_there() -> None:
    assert demand_of([gateway()], "team-a/other", NOW) == Demand(0, None, True)
    assert demand_of([], "team-a/other", NOW) == Demand(0, None, True)
    assert demand_of([gateway(held=2), gateway(2, held=1, idle_seconds=3.0)], "team-a/qwen", NOW).held == 3


pods = st.builds(
    lambda number, ready, silent, held, idle: gateway(
        number,
        ready=ready,
        **({"silent": timedelta(minutes=silent)} if silent else {"held": held, "idle_seconds": idle}),
    ),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([0, 0, 0, 1, 11]),
    st.integers(0, 2),
    st.none() | st.floats(0, 200),
)


@settings(max_examples=200, deadline=None)
@given(
    st.none() | st.lists(pods, max_size=3, unique_by=lambda pod: pod.name),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_a_model_is_never_without_frontends_and_gateway(
    found: list[GatewayPod] | None, frontends: int, any_ready: bool, serves: bool, suspended: bool
) -> None:
    """Whatever is observed: a plan that removes the last frontends leads to a gateway that is ready."""
    scene = serving() if serves else at_zero(SPEC | ({"suspend": True} if suspended else {}))
    scale_frontends(scene, frontends, ready=frontends if any_ready else 0)
    facts = facts_of(scene, *(found or ()), known=found is not None)
    seen = planned(facts)
    if seen.frontends == 0:
        assert not facts.replicas and not suspended
        assert frontends == 0 or seen.addresses
    if found is not None and any(pod.status is not None and pod.status.models["team-a/qwen"].held for pod in found):
        assert suspended or (facts.wanted and seen.frontends), "a held request starts the model"
    if seen.applied is not None:
        assert seen.frontends == 0 or not facts.ready_frontends, "no second way to frontends that serve"
        assert set(seen.addresses) == {pod.address for pod in found or () if pod.ready}
