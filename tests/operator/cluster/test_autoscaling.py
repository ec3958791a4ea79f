"""Scaling on a real API server: by the operator, from and to zero, through /scale; new attempts of failed replicas."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from minisgl_operator.api.objects import Manifest
from minisgl_operator.facts.wanted import owners_of_count
from minisgl_operator.shell.resources import MODEL
from support.cluster.control_plane import LocalControlPlane
from support.cluster.operated_cluster import SECONDS, OperatedCluster, pvc_model
from support.cluster.simulated_pods import report, running_status

WAKE_SECONDS = 2.0
SLACK = 3


@pytest.fixture(scope="module")
def cluster(control_plane: LocalControlPlane) -> Iterator[OperatedCluster]:
    with OperatedCluster(control_plane) as cluster:
        yield cluster


def scaled(name: str, **autoscaling: object) -> Manifest:
    defaults = {"minReplicas": 0, "maxReplicas": 3, "target": {"runningPerReplica": 4}, "scaleDownDelaySeconds": 1}
    return pvc_model(name, autoscaling={**defaults, "idleSecondsToZero": 30, **autoscaling})


def replicas(cluster: OperatedCluster, name: str) -> list[str]:
    return sorted(child for kind, child in cluster.children(name) if kind == "StatefulSet")


def target(cluster: OperatedCluster, name: str) -> object:
    return cluster.status(name).get("autoscaling", {}).get("targetReplicas")


def test_the_deployment_of_frontends_is_a_scale_target_unless_the_spec_has_a_number(cluster: OperatedCluster) -> None:
    def size() -> int:
        return int((cluster.get("Deployment", "front-frontend") or {"spec": {"replicas": 0}})["spec"]["replicas"])

    def owners() -> set[str]:
        deployment = cluster.get("Deployment", "front-frontend")
        assert deployment is not None
        return {each["manager"] for each in owners_of_count(deployment["metadata"]["managedFields"])}

    with cluster.operator() as operator:
        cluster.apply(pvc_model("front"))
        cluster.until(lambda: size() == 1, "one frontend at first")
        cluster.control_plane.kubectl("-n", cluster.namespace, "scale", "deployment/front-frontend", "--replicas=3")
        cluster.until(lambda: cluster.status("front").get("frontend", {}).get("readyReplicas") == 3, "three frontends")
        cluster.merge(MODEL.kind, "front", {"spec": {"frontend": {"leaveSeconds": 20}}})
        cluster.until_quiet(operator)
        assert size() == 3, "an edit of the template leaves the number"
        assert owners() == {"kubectl"}, "an apply must not undo the next change of an autoscaler"
        cluster.merge(MODEL.kind, "front", {"spec": {"frontend": {"replicas": 2}}})
        cluster.until(lambda: size() == 2, "the number of the spec")
        assert owners() == {"minisgl-operator"}
        cluster.control_plane.kubectl("-n", cluster.namespace, "scale", "deployment/front-frontend", "--replicas=4")
        cluster.until(lambda: size() == 2, "the number of the spec again")
        cluster.merge(MODEL.kind, "front", {"spec": {"frontend": {"replicas": None}}})
        cluster.until_quiet(operator)
        assert size() == 2, "it stays until another one changes it"


def test_a_model_goes_to_three_replicas_and_to_zero_and_wakes(cluster: OperatedCluster) -> None:
    cluster.loads["one"] = {"held": 0, "idle_seconds": 0.0}
    cluster.apply(scaled("one"))
    assert cluster.health("one") == "InProgress", "no operator has seen it"
    with cluster.operator() as operator:
        cluster.until(lambda: cluster.status("one").get("phase") == "Idle", "a new model begins with minReplicas")
        cluster.wait_as_users_do("one", "Ready")
        assert cluster.condition("one", "Ready")["reason"] == "ScaledToZero"
        assert cluster.health("one") == "Current"
        cluster.loads["one"] = {"held": 9, "idle_seconds": 0.0}
        cluster.until(lambda: len(replicas(cluster, "one")) == 3, "a replica for each 4 requests")
        cluster.loads["one"] = {"held": 0, "idle_seconds": 0.0}
        cluster.requests["one-r0"] = cluster.requests["one-r1"] = cluster.requests["one-r2"] = 3
        cluster.until(lambda: cluster.ready("one") and cluster.status("one")["readyReplicas"] == 3, "three that serve")
        cluster.merge(MODEL.kind, "one", {"spec": {"replicas": 1}})
        cluster.until_quiet(operator)
        assert target(cluster, "one") == 3, "spec.replicas is ignored"
        cluster.requests["one-r0"] = cluster.requests["one-r1"] = cluster.requests["one-r2"] = 0
        cluster.until(lambda: replicas(cluster, "one") == ["one-r0"], "one that stays")
        cluster.loads["one"] = {"held": 0, "idle_seconds": 31.0}
        cluster.until(lambda: cluster.status("one")["phase"] == "Idle" and not replicas(cluster, "one"), "zero again")
        cluster.until_quiet(operator)
        cluster.loads["one"] = {"held": 1, "idle_seconds": 0.0}
        began = time.monotonic()
        cluster.until(lambda: replicas(cluster, "one"), "the replica for the held request")
        assert time.monotonic() - began < SLACK * WAKE_SECONDS
        cluster.loads["one"] = {"held": 0, "idle_seconds": 0.0}
        cluster.until(lambda: cluster.status("one")["readyReplicas"] == 1 and cluster.ready("one"), "ready for it")


def test_a_new_operator_keeps_the_decision_and_removes_nothing_that_it_does_not_know(cluster: OperatedCluster) -> None:
    cluster.loads["kept"] = {"held": 5, "idle_seconds": 0.0}
    with cluster.operator():
        cluster.apply(scaled("kept", maxReplicas=2))
        cluster.until(lambda: len(replicas(cluster, "kept")) == 2, "two replicas")
        cluster.until(lambda: cluster.ready("kept") and cluster.status("kept")["readyReplicas"] == 2, "both serve")
        cluster.requests["kept-r0"] = cluster.requests["kept-r1"] = 3
        cluster.loads["kept"] = {"held": 0, "idle_seconds": 0.0}
    frontend = next(
        pod["metadata"]["name"] for pod in cluster.list("Pod") if "kept-frontend" in pod["metadata"]["name"]
    )
    cluster.reports[frontend] = None
    cluster.requests["kept-r0"] = cluster.requests["kept-r1"] = 0
    with cluster.operator() as operator:
        assert operator.started.wait(SECONDS)
        cluster.until_quiet(operator)
        assert len(replicas(cluster, "kept")) == 2, "its frontend does not answer"
        del cluster.reports[frontend]
        cluster.until(lambda: len(replicas(cluster, "kept")) == 1, "the load is known again")


def test_the_scale_subresource_counts_replicas_for_other_autoscalers(cluster: OperatedCluster) -> None:
    with cluster.operator():
        cluster.apply(pvc_model("hpa", parallelism={"tensor": 2, "gpusPerPod": 1}))
        cluster.until(lambda: cluster.ready("hpa"), "Ready")
        cluster.control_plane.kubectl("scale", "imodel/hpa", "--replicas=2", "-n", cluster.namespace)
        cluster.until(lambda: cluster.ready("hpa") and cluster.status("hpa")["readyReplicas"] == 2, "two replicas")
        path = f"{MODEL.path(cluster.namespace, 'hpa')}/scale"
        scale = json.loads(cluster.control_plane.kubectl("get", "--raw", path).stdout)
        assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (2, 2)
        pods = cluster.list("Pod", scale["status"]["selector"])
        assert sorted(pod["metadata"]["name"] for pod in pods) == ["hpa-r0-0", "hpa-r1-0"], "one pod of each replica"


def test_a_failed_replica_is_tried_again_and_its_count_outlives_pod_and_operator(cluster: OperatedCluster) -> None:
    failure = {"at": "2026-01-01T00:00:00Z", "rank": 0, "pod": "bad-r0-0", "exit_code": 1, "reason": "Error"}

    def fail(leader_start: int) -> None:
        pod = next(each for each in cluster.list("Pod") if each["metadata"]["name"] == "bad-r0-0")
        body = report(pod, [pod]) or {}
        cluster.statuses["bad-r0-0"] = running_status(pod, ready=False)
        cluster.reports["bad-r0-0"] = body | {
            "phase": "Failed",
            "ready": False,
            "ready_ranks": 0,
            "epoch": [leader_start, 6],
            "last_failure": failure | {"message": "unlucky"},
        }

    def retry() -> Manifest:
        return dict((cluster.status("bad").get("replicaStatuses") or [{}])[0].get("retry") or {})

    with cluster.operator():
        cluster.apply(pvc_model("bad"))
        cluster.until(lambda: cluster.ready("bad"), "Ready")
        first = cluster.get("Pod", "bad-r0-0")
        assert first is not None
        fail(1)
        cluster.until(lambda: retry().get("failures") == 1, "the first failure")
    # As if the pause had passed.
    status = cluster.status("bad")
    earlier = datetime.now(UTC) - timedelta(seconds=61)
    status["replicaStatuses"][0]["retry"]["failedAt"] = earlier.strftime("%Y-%m-%dT%H:%M:%SZ")
    cluster.merge(MODEL.kind, "bad", {"status": {"replicaStatuses": status["replicaStatuses"]}}, "status")
    with cluster.operator():

        def recreated() -> bool:
            live = cluster.get("Pod", "bad-r0-0")
            return live is not None and live["metadata"]["uid"] != first["metadata"]["uid"]

        cluster.until(recreated, "a new pod")
        fail(2)
        cluster.until(lambda: retry().get("failures") == 2, "the second failure")
        times = {name: datetime.fromisoformat(retry()[name]) for name in ("failedAt", "retryAt")}
        assert times["retryAt"] - times["failedAt"] == timedelta(minutes=2)
