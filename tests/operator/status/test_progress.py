"""Conditions during changes: rollouts, scaling, suspension, interconnect, and the phase that summarizes them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from minisgl_operator.api.objects import Ref
from minisgl_operator.facts.observed import Unreachable
from minisgl_operator.render import names
from support.cluster.inference_models import CLAIM, HUB
from support.cluster.scene import Scene, fetch_scene

ONE_POD = {"parallelism": {"tensor": 4}}
NETWORK = {"parallelism": {"tensor": 2, "gpusPerPod": 1}}


def outcome(scene: Scene, kind: str) -> tuple[str, str]:
    found = scene.conditions()[kind]
    return found["status"], found["reason"]


def test_frontends_that_another_one_scales_are_counted_as_the_deployment_says() -> None:
    scene = Scene()
    scene.child("Deployment", "qwen-frontend")["spec"]["replicas"] = 5
    status = scene.status()
    assert status["frontend"] == {"replicas": 5, "readyReplicas": 1}
    ready = scene.conditions()["FrontendReady"]
    assert (ready["status"], ready["message"]) == ("False", "1 of 5 frontends are ready; the others are starting.")


def test_a_rollout_keeps_the_model_ready_and_names_the_replica_it_waits_for() -> None:
    scene = Scene({"replicas": 3}, source=CLAIM)
    scene.outdate("qwen-r1", "qwen-r2")
    assert outcome(scene, "Ready") == ("True", "Ready")
    assert outcome(scene, "Progressing") == ("True", "RollingOut")
    status = scene.status()
    assert (status["phase"], status["updatedReplicas"], status["readyReplicas"]) == ("Updating", 1, 3)
    scene.leader_reports("qwen-r0", phase="Loading")
    scene.frontends_report("qwen-r0")
    message = scene.conditions()["Progressing"]["message"]
    assert "qwen-r1, qwen-r2" in message
    assert "when qwen-r0 is ready" in message
    assert outcome(scene, "Degraded") == ("False", "AllReplicasServe")
    assert scene.status()["phase"] == "Updating"


def test_a_rollout_to_other_tokenizer_files_names_the_replicas_without_requests() -> None:
    scene = Scene({"replicas": 3}, source=CLAIM)
    scene.outdate("qwen-r1", "qwen-r2")
    scene.frontends_report("qwen-r0", waits_for_files=True)
    scene.admission("Accepted")
    message = scene.conditions()["Progressing"]["message"]
    assert "other tokenizer files (qwen-r0) get requests as soon as they are the majority" in message
    assert "The rollout continues when" not in message
    status = scene.status()
    assert (status["phase"], status["updatedReplicas"], status["readyReplicas"]) == ("Updating", 1, 2)


def test_a_rollout_blocked_by_frontends_is_reported() -> None:
    scene = Scene({"replicas": 3, "frontend": {"replicas": 2}}, source=CLAIM)
    scene.outdate("qwen-r1", "qwen-r2")
    scene.frontends_report("qwen-r0", waits_for_files=True)
    # One of the two frontends has not loaded its files, or cannot.
    unable = copy.deepcopy(scene.reports["frontend-1"])
    assert not isinstance(unable, Unreachable)
    for entry in unable["replicas"]:
        entry["waits_for_files"] = False
    scene.reports["frontend-1"] = unable
    message = scene.conditions()["Progressing"]["message"]
    assert "when every frontend can send requests to qwen-r0" in message
    assert "kubectl logs deployment/qwen-frontend" in message
    for frontend in ("frontend-0", "frontend-1"):
        scene.reports[frontend] = Unreachable("timed out")
    assert "when the frontends report to the operator" in scene.conditions()["Progressing"]["message"]


def test_a_rollout_blocked_by_old_replicas_names_them() -> None:
    scene = Scene({"replicas": 3}, source=CLAIM)
    scene.outdate("qwen-r1", "qwen-r2")
    for replica in ("qwen-r1", "qwen-r2"):
        scene.leader_reports(replica, phase="Restarting", restarts=1)
    scene.frontends_report("qwen-r1", "qwen-r2")
    assert "when qwen-r1 is ready" in scene.conditions()["Progressing"]["message"]


def test_a_replica_whose_pods_are_replaced_is_draining() -> None:
    scene = Scene({"replicas": 2}, source=CLAIM)
    scene.outdate("qwen-r0")
    labels = scene.child("StatefulSet", "qwen-r0")["spec"]["template"]["metadata"]["labels"]
    labels[names.REVISION_LABEL] = scene.revision
    scene.child("StatefulSet", "qwen-r0")["spec"]["replicas"] = 0
    scene.frontends_report("qwen-r0")
    status = scene.status()
    assert status["replicaStatuses"][0]["phase"] == "Draining"
    assert outcome(scene, "EngineReady") == ("False", "Draining")
    assert (status["updatedReplicas"], status["phase"]) == (1, "Updating")


def test_a_rollout_to_another_model_begins_when_it_is_cached() -> None:
    scene = Scene(source=HUB)
    job = next(ref for ref in scene.children if ref.kind == "Job")
    scene.children[job]["status"] = {"active": 1}
    annotations = scene.child("StatefulSet", "qwen-r0")["spec"]["template"]["metadata"]["annotations"]
    annotations[names.CACHE_KEY_ANNOTATION] = "other"
    scene.outdate("qwen-r0")
    assert outcome(scene, "ModelCached") == ("False", "WaitingForFetch")
    assert outcome(scene, "Ready") == ("True", "Ready")
    assert "when the model is cached" in scene.conditions()["Progressing"]["message"]
    assert scene.status()["phase"] == "Updating"


def test_a_failed_new_revision_is_degraded_while_the_others_serve() -> None:
    scene = Scene({"replicas": 2}, source=CLAIM)
    scene.outdate("qwen-r1")
    failure = {"rank": 0, "exit_code": 1, "reason": "InvalidModel", "message": "no such layer"}
    scene.leader_reports("qwen-r0", phase="Failed", last_failure=failure)
    scene.frontends_report("qwen-r0")
    assert outcome(scene, "Accepted") == ("False", "InvalidModel")
    assert outcome(scene, "Ready") == ("True", "Ready")
    assert outcome(scene, "Degraded") == ("True", "ReplicasDown")
    assert scene.status()["phase"] == "Degraded"


def test_failures_of_an_old_revision_do_not_reject_the_current_spec() -> None:
    scene = Scene(source=CLAIM)
    scene.leader_reports("qwen-r0", phase="Failed", last_failure={"reason": "InvalidModel", "message": "no"})
    scene.outdate("qwen-r0")
    assert outcome(scene, "Accepted") == ("True", "Accepted")


def test_replaced_frontends_are_a_rollout() -> None:
    scene = Scene({"frontend": {"replicas": 2}}, source=CLAIM)
    scene.child("Deployment", "qwen-frontend")["status"] |= {"replicas": 3, "updatedReplicas": 1}
    assert outcome(scene, "Progressing") == ("True", "RollingOut")
    assert outcome(scene, "Ready") == ("True", "Ready")


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("ProgressDeadlineExceeded", 'ReplicaSet "qwen-frontend-7" has timed out progressing.'),
        ("FailedCreate", "pods is forbidden: no"),
    ],
)
def test_new_frontends_that_never_become_ready_are_degraded(reason: str, message: str) -> None:
    scene = Scene({"frontend": {"replicas": 2}})
    status = scene.child("Deployment", "qwen-frontend")["status"]
    status |= {"replicas": 3, "updatedReplicas": 1, "readyReplicas": 2}
    status["conditions"] = [{"type": "Progressing", "status": "True", "reason": "ReplicaSetUpdated"}]
    assert scene.conditions()["Progressing"]["reason"] == "RollingOut"
    status["conditions"] = [{"type": "Progressing", "status": "False", "reason": reason, "message": message}]
    conditions = scene.conditions()
    for kind, expected in (("Degraded", "True"), ("Progressing", "False")):
        found = conditions[kind]
        assert (found["status"], found["reason"]) == (expected, "ProgressDeadlineExceeded")
        assert message in found["message"]
    assert conditions["Ready"]["status"] == "True", "the old ones serve"
    assert scene.status()["phase"] == "Degraded"


@pytest.mark.parametrize("spec", [{"suspend": True}, {"replicas": 0}])
def test_frontends_of_a_model_that_takes_no_requests_are_never_ready_and_that_is_no_fault(spec: dict[str, Any]) -> None:
    scene = Scene(spec)
    stuck = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    scene.child("Deployment", "qwen-frontend")["status"] |= {"readyReplicas": 0, "conditions": [stuck]}
    assert scene.conditions()["Degraded"]["status"] == "False"


def test_scaling_up_and_down() -> None:
    scene = Scene({"replicas": 2}, source=CLAIM)
    scene.leader_reports("qwen-r1", phase="Loading")
    scene.frontends_report("qwen-r1")
    assert outcome(scene, "Progressing") == ("True", "Scaling")
    assert scene.status()["phase"] == "Updating"
    down = Scene(source=CLAIM)
    leaving = Scene({"replicas": 2}, source=CLAIM).pods["qwen-r1-0"]
    down.pods["qwen-r1-0"] = leaving | {"metadata": leaving["metadata"] | {"deletionTimestamp": "2026-01-01T12:00:00Z"}}
    assert outcome(down, "Progressing") == ("True", "Scaling")
    assert down.status()["replicas"] == 1


@pytest.mark.parametrize(
    ("spec", "words"), [({"suspend": True}, "spec.suspend is true"), ({"replicas": 0}, "kubectl scale imodel/qwen")]
)
def test_a_model_without_replicas_is_suspended(spec: dict[str, Any], words: str) -> None:
    scene = Scene(spec, source=CLAIM)
    scene.no_frontends()
    for kind in ("EngineReady", "FrontendReady", "Ready", "Progressing"):
        assert outcome(scene, kind) == ("True" if kind == "Ready" else "False", "Suspended")
        assert words in scene.conditions()[kind]["message"]
    status = scene.status()
    assert (status["phase"], status["ranks"], status["replicas"]) == ("Suspended", "0/0", 0)


@pytest.mark.parametrize(
    ("spec", "transport", "expected"),
    [
        ({}, "", ("True", "Optimal")),
        (ONE_POD, "P2P/CUMEM", ("True", "Optimal")),
        (ONE_POD, "P2P/CUMEM over NVLink; up to 512 KiB written to all ranks at once", ("True", "Optimal")),
        (ONE_POD, "", ("Unknown", "Unknown")),
        (ONE_POD, "transport unknown", ("Unknown", "Unknown")),
        (ONE_POD, "SHM/direct", ("False", "NoPeerAccess")),
        (ONE_POD, "P2P/CUMEM and SHM/direct", ("False", "NoPeerAccess")),
        (ONE_POD, "NET/Socket", ("False", "NoPeerAccess")),
        (NETWORK, "P2P/IPC", ("True", "Optimal")),
        (NETWORK, "NET/Socket", ("False", "CrossPodTCP")),
        (NETWORK, "NET/Socket and P2P/IPC", ("False", "CrossPodTCP")),
        (NETWORK, "NET/IB and P2P/IPC", ("True", "Optimal")),
        (NETWORK, "NET/Libfabric/0/GDRDMA", ("True", "Optimal")),
        (NETWORK, "SHM/direct", ("False", "NoPeerAccess")),
        (NETWORK, "", ("Unknown", "Unknown")),
        (NETWORK | {"engine": {"device": "cpu"}}, "gloo", ("True", "Optimal")),
    ],
)
def test_the_transport_between_ranks_is_rated(spec: dict[str, Any], transport: str, expected: tuple[str, str]) -> None:
    scene = Scene(spec, source=CLAIM)
    scene.leader_reports("qwen-r0", transport=transport)
    assert outcome(scene, "InterconnectOptimal") == expected


@pytest.mark.parametrize(
    ("engine", "transport", "words"),
    [
        ({}, "NET/Socket and P2P/CUMEM", "no NVLink between pods on one node: spec.engine.shmMedium: Node"),
        ({}, "NET/IB/0 and P2P/CUMEM", "no NVLink between pods on one node: spec.engine.shmMedium: Node"),
        ({"shmMedium": "Node"}, "SHM/direct/direct", "slower than spec.engine.shmMedium: Memory"),
    ],
)
def test_what_the_medium_of_dev_shm_costs_is_said(engine: dict[str, Any], transport: str, words: str) -> None:
    parallelism = {"tensor": 4, "gpusPerPod": 2}

    def message(engine: dict[str, Any]) -> str:
        scene = Scene({"parallelism": parallelism, "engine": engine}, source=CLAIM)
        scene.leader_reports("qwen-r0", transport=transport)
        return str(scene.conditions()["InterconnectOptimal"]["message"])

    assert words in message(engine)
    assert words not in message({"shmMedium": "Memory" if engine else "Node"})


def test_long_lists_are_shortened() -> None:
    scene = Scene({"replicas": 6}, source=CLAIM)
    for index in range(5):
        scene.leader_reports(f"qwen-r{index}", phase="Loading")
    assert "qwen-r0, qwen-r1, qwen-r2 and 2 more" in scene.conditions()["Progressing"]["message"]
    assert "1 of 6 replicas are ready. qwen-r0 loads" in scene.conditions()["EngineReady"]["message"]


def test_the_most_severe_replica_is_reported() -> None:
    scene = Scene({"replicas": 3}, source=CLAIM)
    scene.leader_reports("qwen-r0", phase="Loading")
    failure = {"rank": None, "exit_code": None, "reason": "Error", "message": ""}
    scene.leader_reports("qwen-r2", phase="Failed", last_failure=failure)
    message = scene.conditions()["EngineReady"]["message"]
    assert "qwen-r2: a rank ended (Error)." in message


def test_the_phase_of_a_model_that_is_fetched() -> None:
    assert fetch_scene().status()["phase"] == "Caching"


def test_a_draining_frontend_does_not_count() -> None:
    scene = Scene({"frontend": {"replicas": 2}}, source=CLAIM)
    scene.reports["frontend-1"] = {"kind": "frontend", "ready": False, "draining": True, "replicas": []}
    assert scene.status()["readyReplicas"] == 1


def test_a_partly_placed_replica_and_its_pause_are_reported_with_the_next_step() -> None:
    scene = Scene({"replicas": 2, **NETWORK}, source=CLAIM)
    scene.unschedulable("qwen-r0-1", "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.")
    scene.pods["qwen-r0-1"]["status"]["conditions"][-1]["lastTransitionTime"] = "2026-01-01T11:59:30Z"
    message = scene.conditions()["Scheduled"]["message"]
    assert "within 60 s, all of them are removed" in message

    stateful_set = scene.child("StatefulSet", "qwen-r0")
    stateful_set["spec"]["replicas"] = 0
    stateful_set["metadata"]["annotations"] = {
        names.PARTIAL_STARTS_ANNOTATION: "1",
        names.PAUSED_UNTIL_ANNOTATION: "2026-01-01T12:00:30Z",
    }
    scene.no_pods("qwen-r0")
    scene.child("StatefulSet", "qwen-r1")["spec"]["replicas"] = 0
    scene.no_pods("qwen-r1")
    assert outcome(scene, "Scheduled") == ("False", "PartlyScheduled")
    message = scene.conditions()["Scheduled"]["message"]
    assert "2 pods of qwen-r0" in message and "Free GPUs" in message
    assert scene.status()["phase"] == "Pending"
    assert outcome(scene, "EngineReady") == ("False", "WaitingForPods")

    quota = "exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, used: 4, limited: 4"
    stateful_set["metadata"]["annotations"][names.EXCEEDED_QUOTA_ANNOTATION] = quota
    assert outcome(scene, "Scheduled") == ("False", "QuotaExceeded")
    message = scene.conditions()["Scheduled"]["message"]
    assert "2 pods of qwen-r0" in message and quota in message
    assert "Raise the ResourceQuota" in message and "after a pause" in message and "add nodes" not in message


def test_a_replica_that_waits_for_the_start_of_another_one_says_so() -> None:
    scene = Scene({"replicas": 2, **NETWORK}, source=CLAIM)
    scene.child("StatefulSet", "qwen-r1")["spec"]["replicas"] = 0
    scene.no_pods("qwen-r1")
    scene.pods["qwen-r0-1"]["spec"]["nodeName"] = None
    assert "qwen-r1 starts when all pods of qwen-r0 are on nodes" in scene.conditions()["EngineReady"]["message"]


def test_a_revision_that_fails_beside_one_that_serves_is_reported_and_remembered() -> None:
    scene = Scene({"replicas": 2}, source=CLAIM)
    scene.outdate("qwen-r1")
    scene.waiting("qwen-r0-0", "ImagePullBackOff")
    scene.frontends_report("qwen-r0")
    status = scene.status()
    assert status["failedRevision"] == scene.revision
    message = scene.conditions()["Progressing"]["message"]
    assert "does not start" in message and "Correct the spec" in message

    scene.raw["status"] = status
    del scene.children[Ref("StatefulSet", "qwen-r0")]
    scene.no_pods("qwen-r0")
    assert scene.status()["failedRevision"] == scene.revision
    scene.outdate()
    labels = scene.child("StatefulSet", "qwen-r1")["spec"]["template"]["metadata"]["labels"]
    labels[names.REVISION_LABEL] = scene.revision
    assert "failedRevision" not in scene.status()
