"""Messages of the scheduler, the kubelet and controllers, as three minors of Kubernetes write them."""

from __future__ import annotations

import pytest

from minisgl_operator.api.conditions import Reason
from minisgl_operator.api.objects import Ref
from minisgl_operator.facts.observed import Rejection
from minisgl_operator.facts.pods import cannot_run
from support.cluster.inference_models import CLAIM
from support.cluster.kubernetes_messages import MESSAGES, VERSIONS, WAITING_REASONS, Message
from support.cluster.scene import Scene

POD = "qwen-r0-0"
CASES = [(version, message) for version in VERSIONS for message in MESSAGES if version in message.versions]


def scene_with(message: Message) -> Scene:
    """A model of which Kubernetes says this."""
    scene = Scene(source=CLAIM if message.place not in ("FailedBinding", "ProvisioningFailed") else None)
    match message.place:
        case "PodScheduled":
            scene.unschedulable(POD, message.text)
        case "FailedMount" | "FailedAttachVolume":
            scene.waiting(POD, "ContainerCreating")
            scene.event(scene.pods[POD], message.place, message.text)
        case "FailedCreate":
            scene.no_pods("qwen-r0")
            scene.event(scene.child("StatefulSet", "qwen-r0"), "FailedCreate", message.text)
        case "ReplicaFailure":
            failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message.text}
            scene.child("Deployment", "qwen-frontend")["status"] |= {"conditions": [failure], "readyReplicas": 0}
        case "FailedBinding" | "ProvisioningFailed":
            claim = scene.child("PersistentVolumeClaim", "qwen-cache")
            claim["status"] = {"phase": "Pending"}
            scene.event(claim, message.place, message.text)
        case "rejection of Job" | "rejection of PersistentVolumeClaim":
            ref = Ref(message.place.removeprefix("rejection of "), "qwen-cache")
            scene.rejections = (Rejection(ref, 403, "Forbidden", message.text),)
        case _:
            scene.waiting(POD, message.place, message.text)
    return scene


@pytest.mark.parametrize(("version", "message"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_messages_of_three_minors_are_understood(version: str, message: Message) -> None:
    found = [each for each in scene_with(message).conditions().values() if each["reason"] == message.reason]
    assert found, scene_with(message).conditions()
    assert all(word in found[0]["message"] for word in message.words), found[0]["message"]


def test_every_failure_that_keeps_a_container_waiting_is_known() -> None:
    for reason in WAITING_REASONS:
        scene = Scene(source=CLAIM)
        scene.waiting(POD, reason, "why")
        assert cannot_run(scene.pods[POD]), reason
        if reason != "CrashLoopBackOff":
            found = scene.conditions()["Scheduled"]
            assert found["status"] == "False" and found["reason"] != Reason.PENDING, reason


def test_every_place_has_a_message_of_each_minor() -> None:
    places = {message.place for message in MESSAGES}
    for place in places:
        versions = {version for message in MESSAGES if message.place == place for version in message.versions}
        assert versions == set(VERSIONS), place
