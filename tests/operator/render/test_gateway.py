"""Children of a model behind the cluster's gateway."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from minisgl.frontend.admin.control import HEARS_GATEWAYS
from minisgl_operator.api.objects import Manifest, Ref, ref_of
from minisgl_operator.render import render
from support.cluster.example_models import EXAMPLES
from support.cluster.inference_models import DEFAULTS, inference_model
from support.cluster.kubernetes_schemas import validate

BEHIND_GATEWAY = replace(DEFAULTS, gateway="minisgl")


def children(spec: dict[str, Any] | None = None) -> dict[Ref, Manifest]:
    return {ref_of(each): each for each in render(inference_model(spec), BEHIND_GATEWAY)}


@pytest.mark.parametrize("model", EXAMPLES.values(), ids=EXAMPLES)
def test_a_gateway_adds_one_service_and_changes_no_engine(model: Any) -> None:
    without, behind = ({ref_of(each): each for each in render(model, each)} for each in (DEFAULTS, BEHIND_GATEWAY))
    added = Ref("Service", f"{model.name}-frontend")
    assert behind.keys() - without.keys() == {added}
    validate(behind[added])
    changed = {ref.kind for ref in without if behind[ref] != without[ref]}
    assert changed <= {"NetworkPolicy", "Deployment"}


@pytest.mark.parametrize(
    ("spec", "hear"),
    [({}, True), ({"networkPolicy": {"enabled": False}}, False), ({"frontend": {"mesh": True}}, False)],
    ids=["protected", "without policies", "in a mesh"],
)
def test_frontends_hear_of_the_gateway_only_where_nobody_else_reaches_their_control_port(
    spec: dict[str, Any], hear: bool
) -> None:
    [container] = children(spec)[Ref("Deployment", "qwen-frontend")]["spec"]["template"]["spec"]["containers"]
    assert ({"name": HEARS_GATEWAYS, "value": "true"} in container["env"]) == hear
    without = {ref_of(each): each for each in render(inference_model(spec), DEFAULTS)}
    assert HEARS_GATEWAYS not in str(without[Ref("Deployment", "qwen-frontend")])


def test_the_gateway_finds_the_frontends_under_a_name_of_their_own() -> None:
    found = children()
    service, endpoint = (found[Ref("Service", name)]["spec"] for name in ("qwen-frontend", "qwen"))
    assert service["selector"] == endpoint["selector"]
    assert [port["port"] for port in service["ports"]] == [80, 8000], "as the endpoint, and as its pods"
    assert {port["targetPort"] for port in service["ports"]} == {"http"}


@pytest.mark.parametrize("own", [[], [{"ipBlock": {"cidr": "10.0.0.0/8"}}]], ids=["default clients", "own clients"])
def test_frontends_admit_the_gateway_besides_their_clients(own: list[Any]) -> None:
    policy = children({"networkPolicy": {"ingressFrom": own}})[Ref("NetworkPolicy", "qwen-frontend")]
    clients, operator = policy["spec"]["ingress"]
    assert clients["from"][:-1] == (own or [{"podSelector": {}}])
    gateway = clients["from"][-1]
    assert gateway["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "minisgl-gateway"}}
    assert gateway["namespaceSelector"] == operator["from"][0]["namespaceSelector"]
