"""Pods that a kubelet refuses or ends are reported with the cause, their number, the node and the next step."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from minisgl_operator.status.transitions import events_for
from support.cluster.inference_models import CLAIM
from support.cluster.scene import Scene, fetch_scene

DEVICES = "Allocate failed due to no healthy devices present; cannot allocate unhealthy devices nvidia.com/gpu"


def end(scene: Scene, name: str, reason: str, message: str, **status: Any) -> dict[str, Any]:
    pod = scene.not_ready(name, phase="Failed", reason=reason, message=message, containerStatuses=[], **status)
    scene.reports.pop(name, None)
    return pod


def down(spec: dict[str, Any] | None = None) -> Scene:
    scene = Scene(spec, source=CLAIM)
    scene.no_frontends()
    return scene


@pytest.mark.parametrize(
    ("reason", "message", "words"),
    [
        ("UnexpectedAdmissionError", DEVICES, ("no healthy devices", "device plugin", "kubectl cordon node-0")),
        (
            "OutOfnvidia.com/gpu",
            "Node didn't have enough resource: nvidia.com/gpu",
            ("scheduler assumed", "Allocatable"),
        ),
        ("OutOfmemory", "Node didn't have enough resource: memory", ("scheduler assumed",)),
        ("OutOfpods", "Node didn't have enough resource: pods", ("scheduler assumed",)),
        ("NodeShutdown", "Pod was rejected as the node is shutting down.", ("shuts down",)),
        ("Terminated", "Pod was terminated in response to imminent node shutdown.", ("shuts down",)),
        ("Preempting", "Preempted in order to admit critical pod", ("critical pod", "priorityClassName")),
        ("Evicted", "The node was low on resource: ephemeral-storage.", ("ephemeral-storage", "ran short")),
        ("NodeAffinity", "Predicate NodeAffinity failed", ("labels",)),
        ("TopologyAffinityError", "Resources cannot be allocated with Topology locality", ("topology",)),
        ("SomethingNew", "", ("without a message", "kubectl describe node node-0")),
    ],
)
def test_a_pod_that_its_node_ends_is_reported(reason: str, message: str, words: tuple[str, ...]) -> None:
    scene = down()
    end(scene, "qwen-r0-0", reason, message)
    conditions = scene.conditions()
    found = conditions["Scheduled"]
    assert (found["status"], found["reason"]) == ("False", "PodEndedByNode")
    for word in ("Pod qwen-r0-0 was refused or ended by node node-0", f"({reason})", *words):
        assert word in found["message"], found["message"]
    assert (conditions["Ready"]["reason"], conditions["Ready"]["message"]) == ("PodEndedByNode", found["message"])
    assert (conditions["Degraded"]["status"], conditions["Degraded"]["reason"]) == ("True", "ReplicasDown")
    assert scene.status()["phase"] == "Pending"


def test_the_number_of_pods_and_the_nodes_are_named() -> None:
    scene = down({"replicas": 3})
    for index in range(3):
        end(scene, f"qwen-r{index}-0", "UnexpectedAdmissionError", DEVICES)["spec"]["nodeName"] = "gpu-7"
    assert "qwen-r0-0 and 2 others were refused or ended by node gpu-7 (" in scene.conditions()["Scheduled"]["message"]
    scene.pods["qwen-r1-0"]["spec"]["nodeName"] = "gpu-8"
    assert "by 2 nodes, such as gpu-7 (" in scene.conditions()["Scheduled"]["message"]


def test_the_end_stays_in_the_status_until_the_next_pod_runs() -> None:
    scene = down()
    pod = end(scene, "qwen-r0-0", "UnexpectedAdmissionError", DEVICES, startTime="2026-01-01T11:50:00Z")
    seen = scene.raw["status"] = scene.status()
    assert seen["replicaStatuses"][0]["lastFailure"] == {
        "pod": "qwen-r0-0",
        "node": "node-0",
        "reason": "UnexpectedAdmissionError",
        "message": DEVICES,
        "at": "2026-01-01T11:50:00Z",
    }
    # The controller deletes the pod, creates the next one, and that ends a second later.
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T12:00:00Z"
    assert scene.status(seen) == seen
    del scene.pods["qwen-r0-0"]
    assert scene.status(seen)["conditions"] == seen["conditions"]
    scene.pods["qwen-r0-0"] = again = copy.deepcopy(pod)
    del again["metadata"]["deletionTimestamp"]
    again["status"]["startTime"] = "2026-01-01T11:50:01Z"
    assert scene.status(seen) == seen, "one end a second is not one status a second"
    again["status"]["startTime"] = "2026-01-01T11:52:00Z"
    later = scene.status(seen)
    assert later["conditions"] == seen["conditions"]
    (event,) = events_for(seen, later)
    assert (event.type, event.reason) == ("Warning", "PodEndedByNode")
    assert "qwen-r0-0 was refused or ended by node node-0 (UnexpectedAdmissionError)" in event.note
    # The next one runs.
    running = {"name": "engine", "image": "engine:1", "state": {"running": {}}, "started": False}
    again["status"] = {"phase": "Running", "conditions": [], "containerStatuses": [running]}
    assert scene.conditions(later)["Scheduled"]["status"] == "True"
    assert scene.conditions(later)["Degraded"]["status"] == "False"


def test_what_the_next_pod_lacks_is_reported_first() -> None:
    scene = down()
    end(scene, "qwen-r0-0", "Evicted", "The node was low on resource: memory.")
    seen = scene.raw["status"] = scene.status()
    for key in ("phase", "reason", "message"):
        del scene.pods["qwen-r0-0"]["status"][key]
    scene.unschedulable("qwen-r0-0", "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.")
    assert scene.conditions(seen)["Scheduled"]["reason"] == "InsufficientGPU"


def test_a_frontend_that_its_node_ends_is_reported_until_another_one_serves() -> None:
    scene = Scene(source=CLAIM)
    end(scene, "frontend-0", "Evicted", "The node was low on resource: memory.")
    scene.child("Deployment", "qwen-frontend")["status"]["readyReplicas"] = 0
    conditions = scene.conditions()
    assert "A frontend pod was refused or ended by node node-0 (Evicted)" in conditions["Scheduled"]["message"]
    assert conditions["Degraded"]["reason"] == "FrontendsDown"
    # Its controller leaves the pod, and creates another one.
    scene.child("Deployment", "qwen-frontend")["status"]["readyReplicas"] = 1
    conditions = scene.conditions()
    assert conditions["Scheduled"]["status"] == "True" and conditions["Degraded"]["status"] == "False"


def test_pods_that_a_controller_leaves_behind_are_counted_up_to_a_limit() -> None:
    scene = Scene(source=CLAIM)
    scene.child("Deployment", "qwen-frontend")["status"]["readyReplicas"] = 0
    for name in ("frontend-0", *(f"left-{index}" for index in range(30))):
        scene.pods.setdefault(name, copy.deepcopy(scene.pods["frontend-0"]))
        end(scene, name, "UnexpectedAdmissionError", DEVICES)
    assert "A frontend pod and 9 or more others were refused" in scene.conditions()["Scheduled"]["message"]


def test_a_fetch_pod_that_its_node_ends_is_reported() -> None:
    ended = {"terminated": {"exitCode": 137, "reason": "Error"}}
    containers = [{"name": "fetch", "image": "f", "state": ended}]
    scene = fetch_scene({"phase": "Failed", "reason": "Evicted", "message": "low", "containerStatuses": containers})
    conditions = scene.conditions()
    assert conditions["Scheduled"]["reason"] == conditions["Ready"]["reason"] == "PodEndedByNode"
    assert conditions["ModelCached"]["reason"] == "WaitingForFetch"


@pytest.mark.parametrize(
    ("container", "reason", "words"),
    [
        ({"reason": "OOMKilled", "exitCode": 137}, "OutOfMemory", ("spec.fetch.resources.limits.memory",)),
        ({"reason": "Error", "exitCode": 3, "message": "cannot import x"}, "FetchFailed", ("exit code 3", "import x")),
        ({"reason": "Error", "exitCode": 139}, "FetchFailed", ("exit code 139",)),
    ],
)
def test_a_fetch_that_could_not_report_its_end_is_reported(
    container: dict[str, Any], reason: str, words: tuple[str, ...]
) -> None:
    state = {"terminated": {"finishedAt": "2026-01-01T11:59:00Z"} | container}
    scene = fetch_scene({"phase": "Failed", "containerStatuses": [{"name": "fetch", "image": "f", "state": state}]})
    found = scene.conditions()["ModelCached"]
    assert (found["status"], found["reason"]) == ("False", reason)
    assert all(word in found["message"] for word in words), found["message"]
    scene.child("Job", scene.job)["status"] |= {"failed": 3}
    assert "in 3 attempts" in scene.conditions()["ModelCached"]["message"]
    # The next attempt runs, and has not reported yet.
    scene.pods["fetch-pod"]["status"] = {"phase": "Running", "conditions": [], "containerStatuses": []}
    assert scene.conditions()["ModelCached"]["reason"] == "WaitingForFetch"


@pytest.mark.parametrize("labels", [{}, {"kueue.x-k8s.io/queue-name": "team"}])
def test_a_fetch_that_a_queue_suspends_is_reported(labels: dict[str, str]) -> None:
    scene = fetch_scene()
    scene.no_pods("fetch-pod")
    job = scene.child("Job", scene.job)
    job["metadata"]["labels"] |= labels
    job["status"] = {"conditions": [{"type": "Suspended", "status": "True", "reason": "JobSuspended"}]}
    conditions = scene.conditions()
    found = conditions["ModelCached"]
    assert (found["status"], found["reason"]) == ("False", "FetchSuspended")
    assert scene.job in found["message"] and "queue" in found["message"]
    assert conditions["Ready"]["reason"] == "FetchSuspended"
    job["status"]["conditions"][0]["status"] = "False"
    assert scene.conditions()["ModelCached"]["reason"] == "WaitingForFetch"


def test_a_pod_that_a_queue_gates_names_the_gate() -> None:
    scene = down()
    pod = scene.not_ready("qwen-r0-0", phase="Pending", containerStatuses=[])
    pod["spec"] = {"nodeName": None, "schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
    scene.reports.pop("qwen-r0-0")
    found = scene.conditions()["Scheduled"]
    assert found["reason"] == "Pending" and "kueue.x-k8s.io/admission" in found["message"]


def waiting(name: str, reason: str, **container: Any) -> dict[str, Any]:
    return {"name": name, "image": "i:1", "state": {"waiting": {"reason": reason, "message": "why"}}, **container}


@pytest.mark.parametrize("pod", ["qwen-r0-0", "frontend-0"])
@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("ImagePullBackOff", "ImagePullFailed"),
        ("ErrImagePull", "ImagePullFailed"),
        ("CreateContainerError", "PodNotStarted"),
        ("RunContainerError", "PodNotStarted"),
    ],
)
def test_an_init_container_that_cannot_start_is_reported(pod: str, reason: str, expected: str) -> None:
    scene = down()
    scene.waiting(pod, "PodInitializing")
    scene.pods[pod]["status"]["initContainerStatuses"] = [waiting("mesh-init", reason)]
    found = scene.conditions()["Scheduled"]
    assert (found["status"], found["reason"]) == ("False", expected)
    assert 'container "mesh-init"' in found["message"] and "does not set" in found["message"]
    assert scene.conditions()["Degraded"]["status"] == "True"


@pytest.mark.parametrize("place", ["initContainerStatuses", "containerStatuses"])
def test_a_container_that_others_add_and_that_crashes_is_named(place: str) -> None:
    ended = {"terminated": {"exitCode": 7, "message": "no certificate"}}
    crashing = waiting("mesh-proxy", "CrashLoopBackOff", lastState=ended)
    for pod, kind in (("qwen-r0-0", "EngineReady"), ("frontend-0", "FrontendReady")):
        scene = down()
        scene.waiting(pod, "PodInitializing")
        scene.pods[pod]["status"].setdefault(place, []).append(crashing)
        found = scene.conditions()[kind]
        assert (found["status"], found["reason"]) == ("False", "Crashed")
        for word in ('container "mesh-proxy" with exit code 7: no certificate', "does not set"):
            assert word in found["message"], found["message"]


def test_an_init_container_that_has_done_its_work_is_no_failure() -> None:
    scene = Scene(source=CLAIM)
    done = {"name": "mesh-init", "image": "i:1", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
    scene.pods["qwen-r0-0"]["status"]["initContainerStatuses"] = [done]
    assert scene.status() == Scene(source=CLAIM).status()


def test_a_lost_claim_is_reported() -> None:
    scene = fetch_scene()
    scene.no_pods("fetch-pod")
    claim = scene.child("PersistentVolumeClaim", "qwen-cache")
    claim["status"] = {"phase": "Lost"}
    claim["spec"]["volumeName"] = "pv-7"
    found = scene.conditions()["Scheduled"]
    assert (found["status"], found["reason"]) == ("False", "ClaimLost")
    assert '"qwen-cache" is lost: PersistentVolume "pv-7" does not exist' in found["message"]


def test_a_lost_claim_of_the_user_is_reported() -> None:
    scene = down()
    text = '0/2 nodes are available: persistentvolumeclaim "models" bound to non-existent persistentvolume "pv-7".'
    scene.unschedulable("qwen-r0-0", text)
    found = scene.conditions()["Scheduled"]
    assert found["reason"] == "ClaimLost" and '"models" is lost: PersistentVolume "pv-7"' in found["message"]
