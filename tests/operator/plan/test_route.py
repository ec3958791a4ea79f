"""Routes of a model in plan and status: when it has one, and what its Gateways say."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl_operator.api.objects import Manifest, Ref
from minisgl_operator.facts.facts import Facts
from minisgl_operator.plan.plan import Apply, Delete, plan
from minisgl_operator.status.status import derive_status
from support.cluster.inference_models import CLAIM, DEFAULTS, raw_model
from support.cluster.scene import NOW, Scene, with_observed

ROUTE = Ref("HTTPRoute", "qwen")
PUBLIC = {"name": "public", "namespace": "gateways"}


def routed(**route: Any) -> Scene:
    return Scene({"route": {"parentRefs": [PUBLIC]} | route}, source=CLAIM)


def facts_of(scene: Scene, *group: Manifest, served: bool | None = True) -> Facts:
    return Facts(scene.model, with_observed(scene, group=group, routes_served=served), DEFAULTS, NOW)


def applied(facts: Facts) -> Manifest | None:
    return next((step.manifest for step in plan(facts) if isinstance(step, Apply) and step.ref == ROUTE), None)


def condition(facts: Facts) -> tuple[str, str, str] | None:
    found = [each for each in derive_status(facts, {})["conditions"] if each["type"] == "RouteAccepted"]
    return (found[0]["status"], found[0]["reason"], found[0]["message"]) if found else None


def put_route(scene: Scene, *said: tuple[dict[str, Any], str, str], generation: int = 2, observed: int = 2) -> None:
    """The route as the API server has it; `said`: a parent, and the statuses of Accepted and ResolvedRefs."""
    route = applied(facts_of(scene))
    assert route is not None
    parents = [
        {
            "parentRef": parent,
            "conditions": [
                {"type": type, "status": status, "reason": f"Not{type}", "message": "m", "observedGeneration": observed}
                for type, status in (("Accepted", accepted), ("ResolvedRefs", resolved))
            ],
        }
        for parent, accepted, resolved in said
    ]
    metadata = route["metadata"] | {"uid": "route", "generation": generation}
    scene.children[ROUTE] = route | {"metadata": metadata, "status": {"parents": parents}}


@pytest.mark.parametrize(("served", "exists"), [(True, True), (False, False), (None, False)])
def test_a_route_is_applied_where_the_kind_is_served(served: bool | None, exists: bool) -> None:
    assert (applied(facts_of(routed(), served=served)) is not None) == exists


def test_a_route_that_is_no_longer_wanted_is_deleted() -> None:
    scene = routed()
    put_route(scene)
    scene.raw["spec"]["route"]["enabled"] = False
    scene.model = scene.model.parse(scene.raw)
    facts = facts_of(scene)
    assert [step.ref for step in plan(facts) if isinstance(step, Delete)] == [ROUTE]
    assert condition(facts) is None


def test_the_oldest_model_of_a_group_has_the_names_and_one_that_is_suspended_gets_nothing() -> None:
    scene = routed(group="chat", weight=3)
    scene.raw["metadata"]["creationTimestamp"] = "2026-01-02T00:00:00Z"
    others = {}
    for name, day in (("older", 1), ("younger", 3)):
        spec = {"route": {"parentRefs": [PUBLIC], "group": "chat"}, "model": {"servedNames": ["qwen"]}}
        others[name] = raw_model(spec, name=name)
        others[name]["metadata"]["creationTimestamp"] = f"2026-01-0{day}T00:00:00Z"

    def rules(*group: str) -> list[Any]:
        route = applied(facts_of(scene, *(others[name] for name in group)))
        assert route is not None
        return list(route["spec"]["rules"])

    def weights(rule: Any) -> dict[str, int]:
        return {backend["name"]: backend["weight"] for backend in rule["backendRefs"]}

    assert [weights(rule) for rule in rules("older")] == [{"qwen": 1}], "only its own path"
    assert weights(rules("younger")[0]) == {"qwen": 3, "younger": 1}
    others["younger"]["spec"]["suspend"] = True
    assert weights(rules("younger")[0]) == {"qwen": 3, "younger": 0}
    others["older"]["metadata"]["deletionTimestamp"] = "2026-01-04T00:00:00Z"
    others["younger"]["spec"]["replicas"] = "many"
    assert weights(rules("older", "younger")[0]) == {"qwen": 3}, "one leaves, and one cannot be read"


def test_a_model_without_a_route_has_no_condition_about_it() -> None:
    assert condition(facts_of(Scene(source=CLAIM))) is None
    assert condition(facts_of(Scene({"route": {"enabled": False}}, source=CLAIM))) is None


def test_what_is_missing_is_named() -> None:
    status, reason, message = condition(facts_of(Scene({"route": {}}, source=CLAIM))) or ("", "", "")
    assert (status, reason) == ("False", "NoGatewayNamed") and "spec.route.parentRefs" in message
    status, reason, message = condition(facts_of(routed(), served=False)) or ("", "", "")
    assert (status, reason) == ("False", "GatewayApiMissing") and "install the Gateway API" in message
    assert (condition(facts_of(routed())) or ())[:2] == ("Unknown", "WaitingForGateway")


@pytest.mark.parametrize(
    ("said", "observed", "status", "reason"),
    [
        ([(PUBLIC, "True", "True")], 2, "True", "Accepted"),
        ([(PUBLIC, "False", "True")], 2, "False", "RouteRefused"),
        ([(PUBLIC, "True", "False")], 2, "False", "RouteRefused"),
        ([(PUBLIC, "True", "True")], 1, "Unknown", "WaitingForGateway"),
        ([(PUBLIC, "False", "True")], 1, "Unknown", "WaitingForGateway"),
        ([({"name": "public"}, "True", "True")], 2, "Unknown", "WaitingForGateway"),
        ([(PUBLIC | {"sectionName": "a"}, "True", "True")], 2, "Unknown", "WaitingForGateway"),
        ([], 2, "Unknown", "WaitingForGateway"),
    ],
)
def test_the_condition_is_what_the_gateways_say_about_this_generation(
    said: list[Any], observed: int, status: str, reason: str
) -> None:
    scene = routed()
    put_route(scene, *said, observed=observed)
    found = condition(facts_of(scene))
    assert found is not None and found[:2] == (status, reason)
    assert status == "True" or "gateways/public" in found[2]


def test_one_gateway_of_two_that_is_silent_is_waited_for() -> None:
    near = {"name": "near"}
    scene = routed(parentRefs=[PUBLIC, near])
    put_route(scene, (PUBLIC, "True", "True"))
    assert (condition(facts_of(scene)) or ())[1] == "WaitingForGateway"
    put_route(scene, (PUBLIC, "True", "True"), (near | {"namespace": "team-a"}, "True", "True"))
    assert (condition(facts_of(scene)) or ())[1] == "Accepted"


def test_a_route_that_is_refused_leaves_the_model_ready() -> None:
    scene = routed()
    put_route(scene, (PUBLIC, "False", "True"))
    status = derive_status(facts_of(scene), {})
    assert status["phase"] == "Ready"
    assert not {"Stalled", "Reconciling"} & {each["type"] for each in status["conditions"]}
