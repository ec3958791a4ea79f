"""HTTPRoutes on a real API server that learns the kind while the operator runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from minisgl_operator.api.objects import Manifest
from minisgl_operator.shell.resources import HTTP_ROUTE, MODEL
from support.cluster.control_plane import LocalControlPlane
from support.cluster.http_routes import http_routes
from support.cluster.operated_cluster import OperatedCluster, RunningOperator, pvc_model

GATEWAY = {"name": "public", "namespace": "gateways"}


@pytest.fixture(scope="module")
def cluster(control_plane: LocalControlPlane) -> Iterator[OperatedCluster]:
    with OperatedCluster(control_plane) as cluster:
        yield cluster


def routed(name: str, **route: Any) -> Manifest:
    spec: dict[str, Any] = {"route": {"parentRefs": [GATEWAY], **route}}
    body = pvc_model(name, **spec)
    body["spec"]["model"]["servedNames"] = ["chat"]
    return body


def weights(cluster: OperatedCluster, name: str) -> list[dict[str, int]]:
    """Backends of each rule of a model's route."""
    route = cluster.get(HTTP_ROUTE.kind, name)
    rules = [] if route is None else route["spec"]["rules"]
    return [{backend["name"]: backend["weight"] for backend in rule["backendRefs"]} for rule in rules]


def accept(cluster: OperatedCluster, name: str, accepted: str) -> None:
    """What the controller of the Gateway writes."""
    route = cluster.get(HTTP_ROUTE.kind, name)
    assert route is not None
    generation = route["metadata"]["generation"]
    said = {"type": "Accepted", "status": accepted, "reason": "R", "message": "m", "observedGeneration": generation}
    parent = {"parentRef": GATEWAY, "controllerName": "example.com/gateway", "conditions": [said]}
    cluster.merge(HTTP_ROUTE.kind, name, {"status": {"parents": [parent]}}, "status")


def test_models_get_routes_once_the_kind_is_served_and_a_group_divides_its_requests(cluster: OperatedCluster) -> None:
    def reason(name: str) -> object:
        return cluster.condition(name, "RouteAccepted").get("reason")

    with cluster.operator() as operator:
        cluster.apply(routed("a", group="chat", weight=9))
        cluster.until(lambda: reason("a") == "GatewayApiMissing", "the kind is missed")
        with http_routes(cluster.control_plane):
            _divide_a_group(cluster, operator, reason)


def _divide_a_group(cluster: OperatedCluster, operator: RunningOperator, reason: Callable[[str], object]) -> None:
    cluster.until(lambda: len(weights(cluster, "a")) == 3, "the route")
    cluster.until(lambda: reason("a") == "WaitingForGateway", "the Gateway is waited for")
    accept(cluster, "a", "True")
    cluster.until(lambda: reason("a") == "Accepted", "the Gateway accepts")
    accept(cluster, "a", "False")
    cluster.until(lambda: reason("a") == "RouteRefused", "the Gateway refuses")

    cluster.apply(routed("b", group="chat"))
    cluster.until(lambda: weights(cluster, "a") == [{"a": 9, "b": 1}] * 2 + [{"a": 1}], "a share of the requests")
    cluster.until(lambda: weights(cluster, "b") == [{"b": 1}], "a path of its own")
    cluster.delete(HTTP_ROUTE.kind, "b")
    cluster.until(lambda: weights(cluster, "b") == [{"b": 1}], "the route again")
    cluster.until_quiet(operator)
    writes = operator.writes()
    cluster.until_quiet(operator)
    assert operator.writes() == writes, "defaults of the API server are no change"

    cluster.delete(MODEL.kind, "a")
    cluster.until(lambda: weights(cluster, "b") == [{"b": 1}] * 3, "the names of the group")
    cluster.until(lambda: cluster.get(HTTP_ROUTE.kind, "a") is None, "no route of the deleted model")
    cluster.merge(MODEL.kind, "b", {"spec": {"route": None}})
    cluster.until(lambda: cluster.get(HTTP_ROUTE.kind, "b") is None, "no route that is not wanted")
