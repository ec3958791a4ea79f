"""Rollouts on a real API server with simulated pods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from minisgl_operator.render import names
from support.cluster.control_plane import LocalControlPlane
from support.cluster.operated_cluster import OperatedCluster, pvc_model


@pytest.fixture(scope="module")
def cluster(control_plane: LocalControlPlane) -> Iterator[OperatedCluster]:
    """One operator for all tests here; each test has its own models."""
    with OperatedCluster(control_plane) as cluster, cluster.operator():
        yield cluster


def setting(value: str) -> dict[str, Any]:
    """Engine fields of another revision."""
    return {"env": [{"name": "SOME_SETTING", "value": value}]}


def records(cluster: OperatedCluster, name: str) -> list[dict[str, Any]]:
    """The model's own ControllerRevisions, the oldest first."""
    found = [body for (kind, _), body in cluster.children(name).items() if kind == "ControllerRevision"]
    return sorted(found, key=lambda body: int(body["revision"]))


def test_surge_keeps_every_replica_serving_and_the_last_three_templates_are_recorded(cluster: OperatedCluster) -> None:
    wanted = {"replicas": 2, "rollout": {"strategy": "Surge"}}
    cluster.apply(pvc_model("surge", **wanted))
    cluster.until(lambda: cluster.status("surge").get("readyReplicas") == 2, "two replicas")
    cluster.until(lambda: len(records(cluster, "surge")) == 1, "a record")
    least = 2
    for value in ("b", "c", "d", "e"):
        before = cluster.status("surge")["revision"]
        cluster.apply(pvc_model("surge", engine=setting(value), **wanted))

        def rolled(before: str = before) -> bool:
            nonlocal least
            status = cluster.status("surge")
            least = min(least, status["readyReplicas"])
            counts = (status["replicas"], status["updatedReplicas"], status["readyReplicas"])
            return bool(status["revision"] != before and counts == (2, 2, 2))

        cluster.until(rolled, "the new revision everywhere")
    assert least == 2
    cluster.until(lambda: [int(body["revision"]) for body in records(cluster, "surge")] == [3, 4, 5], "three records")
    newest = records(cluster, "surge")[-1]
    assert newest["metadata"]["labels"][names.REVISION_LABEL] == cluster.status("surge")["revision"]
    assert newest["data"]["template"]["spec"]["containers"][0]["name"] == "engine"


def test_a_revision_that_does_not_serve_by_the_deadline_is_rolled_back(cluster: OperatedCluster) -> None:
    wanted = {"rollout": {"strategy": "Recreate", "progressDeadlineSeconds": 10}}
    cluster.apply(pvc_model("back", **wanted))
    cluster.until(lambda: cluster.ready("back"), "Ready")
    good = cluster.until(lambda: cluster.status("back")["rollout"].get("stableRevision"), "the stable revision")
    pod = cluster.get("Pod", "back-r0-0")
    assert pod is not None
    before = pod["metadata"]["uid"]
    waiting = {"name": "engine", "ready": False, "restartCount": 0, "image": "", "imageID": ""}
    refused = {**waiting, "state": {"waiting": {"reason": "ImagePullBackOff"}}}

    def is_new() -> bool:
        live = cluster.get("Pod", "back-r0-0")
        return live is not None and live["metadata"]["uid"] != before

    cluster.hold = lambda name: name.startswith("back-r0")
    cluster.apply(pvc_model("back", engine=setting("broken"), **wanted))
    cluster.until(is_new, "the pod of the new revision")
    cluster.statuses["back-r0-0"] = {"phase": "Pending", "containerStatuses": [refused]}
    failure = cluster.until(lambda: cluster.status("back")["rollout"].get("failure"), "the failure")
    assert failure == "no replica served within 10 s: pod back-r0-0 waits (ImagePullBackOff)"
    del cluster.statuses["back-r0-0"]
    cluster.hold = lambda name: False
    cluster.until(lambda: cluster.ready("back") and cluster.status("back")["revision"] == good, "the old revision")
    condition = cluster.until(lambda: _rolled_back(cluster), "Progressing")
    assert failure in condition["message"]


def _rolled_back(cluster: OperatedCluster) -> dict[str, Any]:
    found = cluster.condition("back", "Progressing")
    return found if found.get("reason") == "RolledBack" else {}
