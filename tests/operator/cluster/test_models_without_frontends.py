"""A model without frontends on a real API server: its Service has the endpoints of the gateway until one is ready."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.cluster.control_plane import LocalControlPlane
from support.cluster.operated_cluster import OperatedCluster, pvc_model
from support.cluster.simulated_pods import running_status

ADDRESS = "10.9.8.7"
OF_FRONTEND = "10.9.8.6"
SERVICE = "kubernetes.io/service-name"


@pytest.fixture(scope="module")
def cluster(control_plane: LocalControlPlane) -> Iterator[OperatedCluster]:
    with OperatedCluster(control_plane) as cluster:
        yield cluster


def endpoints(cluster: OperatedCluster, service: str) -> set[str]:
    """Addresses that a proxy of Services uses: those of all EndpointSlices with the label."""
    return {
        address
        for each in cluster.list("EndpointSlice", f"{SERVICE}={service}")
        for endpoint in each["endpoints"] or ()
        if endpoint["conditions"].get("ready")
        for address in endpoint["addresses"]
    }


def place_frontend(cluster: OperatedCluster) -> None:
    """Give the frontend a node and an address, without which Kubernetes takes it for no endpoint."""
    [pod] = cluster.list("Pod", "app.kubernetes.io/component=frontend")
    name = pod["metadata"]["name"]
    cluster.statuses[name] = running_status(pod) | {"podIP": OF_FRONTEND, "podIPs": [{"ip": OF_FRONTEND}]}
    cluster.place_on_node(name, ready=True)


def frontends(cluster: OperatedCluster) -> int:
    deployment = cluster.get("Deployment", "idle-frontend")
    return -1 if deployment is None else int(deployment["spec"]["replicas"])


def test_an_idle_model_has_no_pod_and_its_service_leads_to_the_gateway(cluster: OperatedCluster) -> None:
    cluster.start_gateway("gateway-0", "prod", ADDRESS)
    autoscaling = {"minReplicas": 0, "maxReplicas": 1, "target": {"runningPerReplica": 4}, "idleSecondsToZero": 30}
    with cluster.operator(gateway="prod") as operator:
        cluster.apply(pvc_model("idle", autoscaling=autoscaling, frontend={"minReplicas": 0}))
        cluster.wait_as_users_do("idle", "Ready")
        cluster.until(lambda: endpoints(cluster, "idle") == {ADDRESS}, "the gateway as endpoint")
        cluster.until_quiet(operator)
        assert (frontends(cluster), cluster.list("Pod", "app.kubernetes.io/component=frontend")) == (0, [])
        service = cluster.get("Service", "idle")
        assert service is not None and service["spec"]["selector"]["app.kubernetes.io/component"] == "frontend"

        cluster.gateways["gateway-0"] = {"models": {f"{cluster.namespace}/idle": {"held": 1, "idle_seconds": 0.0}}}
        cluster.until(lambda: cluster.status("idle").get("readyReplicas") == 1, "a replica for the held request")
        place_frontend(cluster)
        cluster.until(lambda: endpoints(cluster, "idle") == {OF_FRONTEND}, "the frontend alone as endpoint")
        cluster.until(lambda: endpoints(cluster, "idle-frontend") == {OF_FRONTEND}, "and for the gateway")
        assert cluster.get("EndpointSlice", "idle-gateway") is None
        [frontend] = cluster.list("Pod", "app.kubernetes.io/component=frontend")
        told = frontend["metadata"]["name"]
        cluster.until(lambda: cluster.told_gateways.get(told) == ADDRESS, "the frontend to hear of the gateway")

        cluster.gateways["gateway-0"] = {"models": {f"{cluster.namespace}/idle": {"held": 0, "idle_seconds": 31.0}}}
        cluster.loads["idle"] = {"held": 0, "idle_seconds": 31.0}
        cluster.until(lambda: cluster.status("idle").get("phase") == "Idle" and frontends(cluster) == 0, "idle again")
        cluster.until(lambda: ADDRESS in endpoints(cluster, "idle"), "the gateway as endpoint again")
        live = cluster.get("Service", "idle")
        assert live is not None and live["spec"]["clusterIP"] == service["spec"]["clusterIP"]
        cluster.until_quiet(operator)
        writes = operator.writes()
        cluster.until_quiet(operator)
        assert operator.writes() == writes, "an idle model needs no writes"
