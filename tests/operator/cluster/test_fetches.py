"""Fetch Jobs on a real API server: replacement of one by the next."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from minisgl_operator.facts import fetch_status
from minisgl_operator.render import names
from support.cluster.control_plane import LocalControlPlane
from support.cluster.operated_cluster import OperatedCluster, hub_model

FETCHES = "app.kubernetes.io/component=fetch"
NO_USE = {"exitCode": 2, "reason": "Error"}
NO_ROOM = {"kind": "fetch", "phase": "Failed", "reason": "NoSpace", "needed_bytes": 2, "free_bytes": 1}


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


def key_of(repo: str) -> str:
    return names.cache_key(repo, "main", "https://huggingface.co")


def end_fetch(cluster: OperatedCluster, repo: str, report: dict[str, Any], after: str = "") -> dict[str, Any]:
    """End the pod that fetches this repository for model "room" with this report; returns its Job. `after` is the uid
    of a previous Job."""

    def found() -> tuple[dict[str, Any], dict[str, Any]] | None:
        job = cluster.get("Job", names.fetch("room", key_of(repo)))
        for pod in cluster.list("Pod", FETCHES):
            uid = pod["metadata"]["ownerReferences"][0]["uid"]
            if job is not None and uid == job["metadata"]["uid"] != after:
                return job, pod
        return None

    job, pod = cluster.until(found, f"a pod that fetches {repo}") or ({}, {})
    done = report["phase"] == "Done"
    ended = {"exitCode": 0 if done else 1, "message": json.dumps(report)}
    container = {"name": "fetch", "ready": False, "restartCount": 0, "image": "", "imageID": ""}
    cluster.statuses[pod["metadata"]["name"]] = {
        "phase": "Succeeded" if done else "Failed",
        "containerStatuses": [{**container, "state": {"terminated": ended}}],
    }
    return job


def serves(cluster: OperatedCluster, repo: str) -> bool:
    """True if every replica of model "room" has the files of this repository."""
    sets = [body for (kind, _), body in cluster.children("room").items() if kind == "StatefulSet"]
    found = {each["spec"]["template"]["metadata"]["annotations"][names.CACHE_KEY_ANNOTATION] for each in sets}
    return found == {key_of(repo)} and cluster.ready("room")


def kept(job: dict[str, Any]) -> list[str]:
    """Directories that the pods of a Job keep, which its annotation repeats."""
    arguments = job["spec"]["template"]["spec"]["containers"][0]["args"]
    keep = arguments[arguments.index("--keep") + 1 :]
    assert json.loads(job["metadata"]["annotations"][names.PRUNING_ANNOTATION]) == {"prune": "unused", "keep": keep}
    return list(keep)


def test_a_fetch_without_room_is_created_again_when_the_last_pod_that_used_a_checkpoint_has_ended(
    control_plane: LocalControlPlane,
) -> None:
    """The operator knows what the Job keeps, although its store has no arguments."""
    done = {"kind": "fetch", "phase": "Done"}
    with OperatedCluster(control_plane) as cluster, cluster.operator() as operator:

        def stays(job: dict[str, Any]) -> bool:
            cluster.until(lambda: cluster.condition("room", "ModelCached").get("reason") == "NoSpace", "no room")
            cluster.until_quiet(operator)
            return bool(fetch_job(cluster, "room")["metadata"]["uid"] == job["metadata"]["uid"])

        # Pods that repeat a failed fetch.
        cluster.hold = lambda name: "-fetch-" in name
        cluster.apply(hub_model("room", "owner/a"))
        end_fetch(cluster, "owner/a", done)
        cluster.until(lambda: serves(cluster, "owner/a"), "the first model")
        cluster.place_on_node("room-r0-0", ready=True)
        cluster.apply(hub_model("room", "owner/b"))
        end_fetch(cluster, "owner/b", done)
        cluster.until(lambda: serves(cluster, "owner/b"), "the second model")
        cluster.apply(hub_model("room", "owner/c"))
        first = end_fetch(cluster, "owner/c", NO_ROOM)
        assert kept(first) == sorted([key_of("owner/a"), key_of("owner/b")])
        assert stays(first)
        control_plane.kubectl("delete", "pod", "room-r0-0", "-n", cluster.namespace, "--grace-period=0", "--force")
        second = end_fetch(cluster, "owner/c", NO_ROOM, after=first["metadata"]["uid"])
        assert kept(second) == [key_of("owner/b")]
        assert stays(second), "nothing more can be removed"
