"""Degraded says which disruption budget blocks a node drain that cannot end by itself."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl_operator.facts.observed import NodeState
from support.cluster.inference_models import CLAIM
from support.cluster.scene import Scene

NO_ROOM = "0/2 nodes are available: 1 node(s) were unschedulable, 1 Insufficient nvidia.com/gpu."


def budget(scene: Scene, part: str, **status: int) -> None:
    scene.child("PodDisruptionBudget", f"qwen-{part}")["status"] = {"expectedPods": 1, "disruptionsAllowed": 0} | status


def drained(**spec: Any) -> Scene:
    """Two replicas on a node that is drained; the first one was evicted and fits on no other node."""
    scene = Scene({"replicas": 2, **spec}, source=CLAIM)
    scene.nodes = {"gpu": NodeState(emptied=True), "other": NodeState()}
    scene.pods["qwen-r1-0"]["spec"]["nodeName"] = "gpu"
    scene.unschedulable("qwen-r0-0", NO_ROOM)
    scene.frontends_report("qwen-r0")
    budget(scene, "engine")
    budget(scene, "frontend", disruptionsAllowed=1)
    return scene


def reason(scene: Scene) -> tuple[str, str]:
    found = scene.conditions()["Degraded"]
    return found["status"], found["reason"]


def test_a_drain_that_waits_for_a_replica_without_a_node_names_the_budget() -> None:
    scene = drained()
    found = scene.conditions()["Degraded"]
    assert (found["status"], found["reason"]) == ("True", "DrainBlocked")
    for part in ("drain of gpu", "PodDisruptionBudget qwen-engine", "qwen-r0", "spec.availability.disruptionBudget"):
        assert part in found["message"], found["message"]
    assert scene.status()["phase"] == "Degraded"


def test_a_drain_that_waits_for_a_frontend_without_a_node_names_the_budget() -> None:
    scene = Scene({"frontend": {"replicas": 2}}, source=CLAIM)
    scene.nodes = {"gpu": NodeState(), "cpu": NodeState(emptied=True)}
    scene.pods["frontend-1"]["spec"]["nodeName"] = "cpu"
    scene.unschedulable("frontend-0", NO_ROOM)
    budget(scene, "frontend")
    found = scene.conditions()["Degraded"]
    assert found["reason"] == "DrainBlocked"
    assert "drain of cpu" in found["message"] and "qwen-frontend" in found["message"]


def starts(scene: Scene) -> None:
    scene.leader_reports("qwen-r0", phase="Loading")
    pod = scene.pods["qwen-r0-0"]
    pod["spec"]["nodeName"] = "other"
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]


def no_drain(scene: Scene) -> None:
    scene.nodes = {"gpu": NodeState(), "other": NodeState()}


def cannot_read_nodes(scene: Scene) -> None:
    scene.nodes = None


def may_evict(scene: Scene) -> None:
    budget(scene, "engine", disruptionsAllowed=1)


def leaves_elsewhere(scene: Scene) -> None:
    scene.pods["qwen-r1-0"]["spec"]["nodeName"] = "other"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (starts, ("False", "AllReplicasServe")),
        (no_drain, ("True", "ReplicasDown")),
        (cannot_read_nodes, ("True", "ReplicasDown")),
        (may_evict, ("True", "ReplicasDown")),
        (leaves_elsewhere, ("True", "ReplicasDown")),
    ],
)
def test_nothing_is_said_of_a_drain_that_ends_by_itself_or_does_not_exist(
    change: Any, expected: tuple[str, str]
) -> None:
    scene = drained()
    change(scene)
    assert reason(scene) == expected


def test_a_model_without_budgets_blocks_no_drain() -> None:
    scene = Scene({"replicas": 2, "availability": {"disruptionBudget": "None"}}, source=CLAIM)
    assert not [ref for ref in scene.children if ref.kind == "PodDisruptionBudget"]
    assert reason(scene) == ("False", "AllReplicasServe")
