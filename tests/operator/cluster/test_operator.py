"""The operator on a real API server with simulated pods: created and repaired objects, status, conflicts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from minisgl_operator.shell import peer_tokens
from support.cluster.control_plane import AuditEvent, LocalControlPlane
from support.cluster.operated_cluster import OperatedCluster, pvc_model
from support.cluster.simulated_pods import report, running_status

WRITES = {"create", "update", "patch", "delete", "deletecollection"}


@pytest.fixture(scope="module")
def cluster(control_plane: LocalControlPlane) -> Iterator[OperatedCluster]:
    """One operator for all tests here; each test has its own models."""
    with OperatedCluster(control_plane) as cluster, cluster.operator():
        yield cluster


def claim(name: str = "models") -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }


def test_a_model_becomes_ready_and_kubectl_get_shows_it(cluster: OperatedCluster) -> None:
    cluster.apply(pvc_model("pair", parallelism={"tensor": 2, "gpusPerPod": 1}))
    cluster.until(lambda: cluster.ready("pair"), "Ready")
    printed = cluster.control_plane.kubectl("get", "imodel", "pair", "-n", cluster.namespace, "--no-headers").stdout
    assert printed.split()[1:6] == ["True", "Ready", "Ready", "1", "2/2"]
    status = cluster.status("pair")
    assert status["url"].startswith(f"http://pair.{cluster.namespace}.svc")
    kinds = [kind for kind, _ in cluster.children("pair")]
    assert kinds.count("StatefulSet") == 1 and kinds.count("Deployment") == 1 and kinds.count("Service") == 3
    described = cluster.control_plane.kubectl("describe", "imodel", "pair", "-n", cluster.namespace).stdout
    assert "minisgl-operator" in described.split("Events:")[1], described


def test_drift_is_repaired_and_deleted_children_come_back(cluster: OperatedCluster) -> None:
    cluster.apply(pvc_model("drift", frontend={"replicas": 1}))
    cluster.until(lambda: cluster.ready("drift"), "Ready")
    cluster.merge("Deployment", "drift-frontend", {"spec": {"replicas": 3}})
    cluster.merge("Service", "drift", {"spec": {"ports": [{"name": "http", "port": 81, "targetPort": 1}]}})
    cluster.merge("Service", "drift-leaders", {"metadata": {"labels": {"app.kubernetes.io/managed-by": None}}})
    cluster.merge("ServiceAccount", "drift-engine", {"metadata": {"ownerReferences": None}})

    def repaired() -> bool:
        deployment, service = cluster.get("Deployment", "drift-frontend"), cluster.get("Service", "drift")
        leaders, account = cluster.get("Service", "drift-leaders"), cluster.get("ServiceAccount", "drift-engine")
        assert deployment and service and leaders and account
        return (
            deployment["spec"]["replicas"] == 1
            and [port["port"] for port in service["spec"]["ports"]] == [80]
            and "app.kubernetes.io/managed-by" in leaders["metadata"]["labels"]
            and bool(account["metadata"].get("ownerReferences"))
        )

    cluster.until(repaired, "the repair")
    before = cluster.children("drift")
    for (kind, name), body in before.items():
        cluster.delete(kind, name)
        cluster.until(
            lambda kind=kind, name=name, uid=body["metadata"]["uid"]: (  # type: ignore[misc]
                (live := cluster.get(kind, name)) is not None and live["metadata"]["uid"] != uid
            ),
            f"{kind} {name}",
        )
    cluster.until(lambda: cluster.ready("drift"), "Ready again")
    assert cluster.children("drift").keys() == before.keys()


def test_an_object_of_another_owner_is_a_conflict_and_not_changed(cluster: OperatedCluster) -> None:
    foreign = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "taken"},
        "spec": {"ports": [{"port": 9000}], "selector": {"mine": "yes"}},
    }
    made = cluster.apply(foreign)
    cluster.apply(pvc_model("taken"))
    cluster.apply(pvc_model("bystander"))
    accepted = cluster.until(lambda: _failing(cluster, "taken", "Accepted"), "Accepted=False")
    assert accepted["reason"] == "Conflict"
    assert "Service" in accepted["message"] and "taken" in accepted["message"]
    cluster.until(lambda: cluster.ready("bystander"), "another model's readiness")
    live = cluster.get("Service", "taken")
    assert live is not None and live["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
    cluster.delete("Service", "taken")
    cluster.until(lambda: cluster.ready("taken"), "Ready once the name is free")


def _failing(cluster: OperatedCluster, name: str, type: str) -> dict[str, Any]:
    condition = cluster.condition(name, type)
    return condition if condition.get("status") == "False" else {}


def test_scaling_up_down_and_to_zero_through_the_scale_subresource(cluster: OperatedCluster) -> None:
    cluster.apply(pvc_model("scaled"))
    cluster.until(lambda: cluster.ready("scaled"), "Ready")
    frontend = cluster.get("Deployment", "scaled-frontend")
    assert frontend is not None
    for wanted in (3, 0, 1):
        cluster.control_plane.kubectl("scale", "-n", cluster.namespace, "inferencemodel/scaled", f"--replicas={wanted}")

        def settled(wanted: int = wanted) -> bool:
            sets = [body for (kind, _), body in cluster.children("scaled").items() if kind == "StatefulSet"]
            return len(sets) == wanted and cluster.status("scaled").get("readyReplicas", 0) == wanted

        cluster.until(settled, f"{wanted} replicas")
    cluster.until(lambda: cluster.ready("scaled"), "Ready")
    after = cluster.get("Deployment", "scaled-frontend")
    assert after is not None and after["metadata"]["generation"] == frontend["metadata"]["generation"]
    assert cluster.status("scaled")["selector"]


def test_an_engine_edit_replaces_one_replica_after_the_other(cluster: OperatedCluster) -> None:
    in_place = {"strategy": "Recreate"}
    cluster.apply(pvc_model("rolling", replicas=2, parallelism={"tensor": 2, "gpusPerPod": 1}, rollout=in_place))
    cluster.until(lambda: cluster.status("rolling").get("readyReplicas") == 2, "two replicas")
    frontend = cluster.get("Deployment", "rolling-frontend")
    edited = pvc_model(
        "rolling",
        replicas=2,
        parallelism={"tensor": 2, "gpusPerPod": 1},
        rollout=in_place,
        engine={"env": [{"name": "SOME_SETTING", "value": "new"}]},
    )
    before = cluster.status("rolling")["revision"]
    cluster.apply(edited)
    least = 2

    def rolled() -> bool:
        nonlocal least
        pods: dict[str, set[str]] = {}
        for pod in cluster.list("Pod", "app.kubernetes.io/instance=rolling,app.kubernetes.io/component=engine"):
            labels = pod["metadata"]["labels"]
            pods.setdefault(labels["serving.minisgl.io/replica"], set()).add(labels["serving.minisgl.io/revision"])
        assert all(len(revisions) == 1 for revisions in pods.values()), f"two revisions in one replica: {pods}"
        status = cluster.status("rolling")
        least = min(least, status["readyReplicas"])
        return bool(status["revision"] != before and status["updatedReplicas"] == 2 and status["readyReplicas"] == 2)

    cluster.until(rolled, "the new revision everywhere")
    assert least == 1, "a replica at a time"
    after = cluster.get("Deployment", "rolling-frontend")
    assert frontend and after and after["metadata"]["generation"] == frontend["metadata"]["generation"]


def test_a_rollout_restart_replaces_frontends_and_an_annotation_replaces_engines(cluster: OperatedCluster) -> None:
    def uids(component: str) -> set[str]:
        selector = f"app.kubernetes.io/instance=again,app.kubernetes.io/component={component}"
        return {pod["metadata"]["uid"] for pod in cluster.list("Pod", selector)}

    def restart(what: str) -> None:
        cluster.control_plane.kubectl("rollout", "restart", "-n", cluster.namespace, what)

    def replaced(component: str, before: set[str]) -> bool:
        return cluster.ready("again") and len(uids(component)) == 1 and not uids(component) & before

    cluster.apply(pvc_model("again"))
    cluster.until(lambda: cluster.ready("again"), "Ready")
    frontends, engines = uids("frontend"), uids("engine")
    restart("statefulset/again-r0")
    restart("deployment/again-frontend")
    cluster.until(lambda: replaced("frontend", frontends), "another frontend")
    assert uids("engine") == engines, "only the operator replaces engines"
    annotations = {"podTemplate": {"annotations": {"restarted": "today"}}}
    cluster.merge("InferenceModel", "again", {"spec": {"engine": annotations}})
    cluster.until(lambda: replaced("engine", engines), "another engine")


def test_deleting_a_model_leaves_no_objects(cluster: OperatedCluster) -> None:
    cluster.apply(pvc_model("gone"))
    cluster.until(lambda: cluster.ready("gone"), "Ready")
    cluster.delete("InferenceModel", "gone")
    cluster.until(lambda: not cluster.children("gone"), "the end of all children")
    cluster.until(lambda: not cluster.list("Pod", "app.kubernetes.io/instance=gone"), "the end of all pods")
    cluster.apply(pvc_model("gone"))
    cluster.until(lambda: cluster.ready("gone"), "Ready under the same name")


def test_engines_refuse_others_once_all_pods_of_the_model_know_a_token(cluster: OperatedCluster) -> None:
    cluster.apply(pvc_model("known", replicas=2))
    cluster.until(lambda: cluster.ready("known"), "Ready")
    engines = ("known-r0-0", "known-r1-0")
    cluster.until(lambda: all(cluster.told_to_refuse.get(name) for name in engines), "the demand for a proof")
    frontends = [pod["metadata"]["name"] for pod in cluster.list("Pod", "app.kubernetes.io/component=frontend")]
    assert not any(cluster.told_to_refuse[name] for name in frontends if name.startswith("known-"))
    # A pod of an earlier version reports nothing.
    cluster.reports["known-r1-0"] = {"kind": "engine", "replica": "known-r1", "phase": "Loading", "ready": False}
    cluster.until(lambda: not any(cluster.told_to_refuse[name] for name in engines), "the end of the demand")
    del cluster.reports["known-r1-0"]
    cluster.until(lambda: all(cluster.told_to_refuse[name] for name in engines), "the demand again")


def test_a_secret_of_a_models_pods_that_is_deleted_is_written_again(
    cluster: OperatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_tokens, "_AGAIN", timedelta(0))
    cluster.apply(pvc_model("rewritten"))
    cluster.until(lambda: cluster.told_to_refuse.get("rewritten-r0-0"), "the demand for a proof")
    cluster.control_plane.kubectl("delete", "secret", "rewritten-peers-a", "-n", cluster.namespace)
    cluster.until(lambda: not cluster.told_to_refuse["rewritten-r0-0"], "the end of the demand")
    cluster.until(lambda: cluster.told_to_refuse["rewritten-r0-0"], "the demand again")


def test_the_secrets_of_a_models_pods_are_deleted_with_it(cluster: OperatedCluster) -> None:
    def tokens() -> list[str]:
        found = cluster.control_plane.kubectl("get", "secrets", "-n", cluster.namespace, "-o", "name").stdout.split()
        return [name for name in found if name.startswith("secret/brief-")]

    cluster.apply(pvc_model("brief"))
    cluster.until(lambda: cluster.ready("brief"), "Ready")
    assert tokens() == ["secret/brief-peers-a"]
    cluster.delete("InferenceModel", "brief")
    cluster.until(lambda: not tokens(), "their end")


def test_a_pod_with_a_failed_mount_is_reported_with_the_cause(cluster: OperatedCluster) -> None:
    """A kubelet's event about a waiting pod becomes the condition's message."""
    waiting = {"name": "engine", "ready": False, "restartCount": 0, "image": "", "imageID": ""}
    cluster.statuses["mount-r0-0"] = {
        "phase": "Pending",
        "containerStatuses": [{**waiting, "state": {"waiting": {"reason": "ContainerCreating"}}}],
    }
    cluster.apply(pvc_model("mount"))
    pod = cluster.until(lambda: cluster.get("Pod", "mount-r0-0"), "the pod")
    cluster.control_plane.apply(
        {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": "mount-r0-0.1", "namespace": cluster.namespace},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "namespace": cluster.namespace,
                "name": "mount-r0-0",
                "uid": pod["metadata"]["uid"],
            },
            "reason": "FailedMount",
            "message": 'MountVolume.SetUp failed for volume "certificates" : secret "corporate-ca" not found',
            "type": "Warning",
            "source": {"component": "kubelet"},
            "firstTimestamp": "2026-01-01T00:00:00Z",
            "lastTimestamp": "2026-01-01T00:00:00Z",
            "count": 1,
        }
    )
    accepted = cluster.until(lambda: _failing(cluster, "mount", "Accepted"), "the reason")
    assert accepted["reason"] == "SecretNotFound" and "corporate-ca" in accepted["message"]
    del cluster.statuses["mount-r0-0"]
    cluster.until(lambda: cluster.ready("mount"), "Ready")


def test_a_failed_rank_appears_in_the_status_until_it_recovers(cluster: OperatedCluster) -> None:
    cluster.apply(pvc_model("failing"))
    cluster.until(lambda: cluster.ready("failing"), "Ready")
    pod = cluster.get("Pod", "failing-r0-0")
    assert pod is not None
    told = report(pod, [pod])
    assert told is not None
    failure = {
        "at": "2026-01-01T00:00:00Z",
        "rank": 0,
        "pod": "failing-r0-0",
        "exit_code": -9,
        "reason": "Killed",
        "message": "last words",
    }
    cluster.statuses["failing-r0-0"] = running_status(pod, ready=False)
    cluster.reports["failing-r0-0"] = {
        **told,
        "ready": False,
        "phase": "Restarting",
        "ready_ranks": 0,
        "restarts": 1,
        "last_failure": failure,
    }

    def told_why() -> Any:
        (replica,) = cluster.status("failing")["replicaStatuses"]
        return replica if "lastFailure" in replica else None

    replica = cluster.until(told_why, "the failure in the status")
    assert replica["lastFailure"]["exitCode"] == -9
    assert replica["lastFailure"]["message"] == "last words"
    del cluster.statuses["failing-r0-0"], cluster.reports["failing-r0-0"]
    cluster.statuses["failing-r0-0"] = running_status(pod)
    cluster.until(lambda: cluster.ready("failing"), "Ready again")


def test_a_terminating_namespace_deletes_the_model(control_plane: LocalControlPlane) -> None:
    with OperatedCluster(control_plane) as cluster, cluster.operator() as operator:
        cluster.apply(pvc_model("doomed"))
        cluster.until(lambda: cluster.ready("doomed"), "Ready")
        control_plane.kubectl("delete", "namespace", cluster.namespace, "--wait=false")
        cluster.until(
            lambda: control_plane.kubectl("get", "namespace", cluster.namespace, check=False).returncode != 0,
            "the namespace's end",
        )
        assert operator.alive and operator.error is None
        cluster.until(lambda: not operator.call(lambda controller: controller.store.models()), "an empty store")


def test_twenty_idle_models_cause_no_write_at_all(control_plane: LocalControlPlane) -> None:
    user = "idle-operator"
    with OperatedCluster(control_plane) as cluster:
        control_plane.kubectl("create", "clusterrolebinding", user, "--clusterrole=cluster-admin", f"--user={user}")
        kubeconfig = control_plane.kubeconfig_for(user)
        with cluster.operator(kubeconfig=kubeconfig, resync_seconds=1.0, probe_seconds=0.5) as operator:
            names = [f"idle-{number}" for number in range(20)]
            for name in names:
                cluster.apply(pvc_model(name))
            for name in names:
                cluster.until(lambda name=name: cluster.ready(name), name)  # type: ignore[misc]
            cluster.until_quiet(operator)
            versions = _versions_at_rest(cluster)
            start = len(_requests(control_plane, user))
            lists = [one for one in _requests(control_plane, user) if one["verb"] == "list"]
            end = time.monotonic() + 60
            # Three full resyncs: ten kinds each.
            while len([o for o in _requests(control_plane, user) if o["verb"] == "list"]) < len(lists) + 30:
                assert time.monotonic() < end, "no resync"
                time.sleep(0.2)
            writes = [one["requestURI"] for one in _requests(control_plane, user)[start:] if one["verb"] in WRITES]
            assert writes == []
            assert versions == _versions(cluster)


def _requests(control_plane: LocalControlPlane, user: str) -> list[AuditEvent]:
    return [event for event in control_plane.audit() if event["user"]["username"] == user]


def _versions_at_rest(cluster: OperatedCluster) -> dict[tuple[str, str], str]:
    """Wait until the other controllers have stopped writing, too."""
    before = _versions(cluster)
    while True:
        time.sleep(1)
        now = _versions(cluster)
        if now == before:
            return now
        before = now


def _versions(cluster: OperatedCluster) -> dict[tuple[str, str], str]:
    return {key: body["metadata"]["resourceVersion"] for key, body in _everything(cluster).items()}


def _everything(cluster: OperatedCluster) -> dict[tuple[str, str], Any]:
    bodies = cluster.list("InferenceModel") + cluster.list("StatefulSet") + cluster.list("Deployment")
    bodies += cluster.list("Service") + cluster.list("NetworkPolicy") + cluster.list("PodDisruptionBudget")
    return {(body["kind"], body["metadata"]["name"]): body for body in bodies}
