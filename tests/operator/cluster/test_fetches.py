"""Fetch Jobs on a real API server: replacement of one by the next."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from minisgl_operator.facts import fetch_status
from support.cluster.control_plane import LocalControlPlane
from support.cluster.operated_cluster import OperatedCluster, hub_model

FETCHES = "app.kubernetes.io/component=fetch"
NO_USE = {"exitCode": 2, "reason": "Error"}


def fetch_job(cluster: OperatedCluster, name: str) -> dict[str, Any]:
    return next((body for (kind, _), body in cluster.children(name).items() if kind == "Job"), {})


def test_a_permanently_failed_fetch_is_retried_after_its_delay(
    control_plane: LocalControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The retry does not wait for the next full list, which may take as long again."""
    monkeypatch.setattr(fetch_status, "RETRY_FETCH_AFTER", timedelta(seconds=5))
    with OperatedCluster(control_plane) as cluster, cluster.operator(resync_seconds=3600.0):
        asked = hub_model("refused")
        # A PVC of the model would get no volume here, and would be listed again and again.
        asked["spec"]["model"]["cache"] = {"claimName": "theirs"}
        cluster.apply(asked)
        (pod,) = cluster.until(lambda: cluster.list("Pod", FETCHES), "a pod that fetches")
        first = fetch_job(cluster, "refused")
        container = {"name": "fetch", "ready": False, "restartCount": 0, "image": "", "imageID": ""}
        cluster.statuses[pod["metadata"]["name"]] = {
            "phase": "Failed",
            "containerStatuses": [{**container, "state": {"terminated": NO_USE}}],
        }
        cluster.until(lambda: cluster.status("refused").get("phase") == "Failed", "the failure")

        def another() -> bool:
            job = fetch_job(cluster, "refused")
            return bool(job) and job["metadata"]["uid"] != first["metadata"]["uid"]

        cluster.until(another, "another try")


def test_a_fetch_job_is_not_created_while_a_pod_of_the_previous_one_exists(control_plane: LocalControlPlane) -> None:
    """Two pods would write to the same directory."""
    with OperatedCluster(control_plane) as cluster, cluster.operator() as operator:
        cluster.apply(hub_model("writes"))
        (pod,) = cluster.until(lambda: cluster.list("Pod", FETCHES), "a pod that fetches")
        name, first = pod["metadata"]["name"], fetch_job(cluster, "writes")
        cluster.place_on_lost_node(name)
        edited = hub_model("writes")
        edited["spec"]["model"]["source"]["huggingFace"]["tokenSecretRef"] = {"name": "hub"}
        cluster.apply(edited)
        cluster.until(lambda: "deletionTimestamp" in cluster.list("Pod", FETCHES)[0]["metadata"], "the pod's end")
        cluster.until_quiet(operator)
        assert [one["metadata"]["name"] for one in cluster.list("Pod", FETCHES)] == [name]
        control_plane.kubectl("delete", "pod", name, "-n", cluster.namespace, "--grace-period=0", "--force")

        def another() -> bool:
            found = [one for one in cluster.list("Pod", FETCHES) if one["metadata"]["name"] != name]
            return bool(found) and fetch_job(cluster, "writes")["metadata"]["uid"] != first["metadata"]["uid"]

        cluster.until(another, "the fetch with the token")
