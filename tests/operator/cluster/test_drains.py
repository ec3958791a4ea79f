"""Node drains while a model serves: the disruption budget on a real API server and its controllers."""

from __future__ import annotations

import asyncio
from typing import Any

from minisgl_operator.shell.client import ApiError
from minisgl_operator.shell.resources import POD
from support.cluster.control_plane import LocalControlPlane
from support.cluster.operated_cluster import OperatedCluster, pvc_model
from support.cluster.simulated_pods import running_status


async def _evict(cluster: OperatedCluster, pod: str) -> bool:
    """Request an eviction, as a drain does, repeatedly for some seconds; False when the budget allows none."""
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": cluster.namespace},
    }
    try:
        await cluster.client.request("POST", POD.path(cluster.namespace, pod, "eviction"), {}, body)
    except ApiError as error:
        assert error.status == 429, error
        return False
    return True


def _evict_all(cluster: OperatedCluster, pods: list[str]) -> set[str]:
    """Pods that were evicted, of those whose evictions are requested at the same time."""

    async def step() -> list[bool]:
        return await asyncio.gather(*(_evict(cluster, pod) for pod in pods))

    return {pod for pod, gone in zip(pods, cluster.run(step()), strict=True) if gone}


def test_concurrent_drains_evict_all_pods_of_one_replica_and_none_of_another(
    control_plane: LocalControlPlane,
) -> None:
    with OperatedCluster(control_plane) as cluster, cluster.operator():
        cluster.apply(pvc_model("drained", replicas=2, parallelism={"tensor": 2, "gpusPerPod": 1}))
        cluster.until(lambda: cluster.status("drained").get("readyReplicas") == 2, "two replicas")
        cluster.until(lambda: _allowed(cluster, 3) == 1, "a budget that allows one")
        replicas: dict[str, list[str]] = {f"drained-r{i}": [f"drained-r{i}-{k}" for k in range(2)] for i in range(2)}
        # An evicted pod is created again immediately, and gets no node.
        cluster.hold = lambda name: name.startswith("drained-r")
        gone = _evict_all(cluster, [pod for pods in replicas.values() for pod in pods])
        assert len({pod.rpartition("-")[0] for pod in gone}) == 1, gone
        (taken,) = {pod.rpartition("-")[0] for pod in gone}
        (kept,) = replicas.keys() - {taken}
        for pod in set(replicas[taken]) - gone:
            cluster.until(lambda pod=pod: _evict_all(cluster, [pod]), f"the eviction of {pod} too")  # type: ignore[misc]
        assert not _evict_all(cluster, replicas[kept])
        cluster.hold = lambda name: False
        cluster.until(lambda: _allowed(cluster, 3) == 1, "a budget that allows one again")
        assert _evict_all(cluster, replicas[kept][:1])


def test_a_drain_without_room_elsewhere_names_its_budget_and_ends_without_budgets(
    control_plane: LocalControlPlane,
) -> None:
    no_room = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node has room"}
    with OperatedCluster(control_plane) as cluster, cluster.operator():
        cluster.apply(pvc_model("drained", replicas=2))
        cluster.until(lambda: cluster.status("drained").get("readyReplicas") == 2, "two replicas")
        cluster.place_on_node("drained-r1-0", ready=True)
        control_plane.kubectl("cordon", cluster.node)
        cluster.until(lambda: _allowed(cluster, 1) == 1, "a budget that allows one")
        cluster.hold = lambda name: name == "drained-r0-0"
        assert _evict_all(cluster, ["drained-r0-0"])
        # Only now: the simulated kubelet would write it to the pod that runs, and the condition would come too early.
        cluster.statuses["drained-r0-0"] = {"phase": "Pending", "conditions": [no_room]}
        cluster.until(lambda: cluster.condition("drained", "Degraded").get("reason") == "DrainBlocked", "the condition")
        message = cluster.condition("drained", "Degraded")["message"]
        assert "PodDisruptionBudget drained-engine" in message and cluster.node in message
        assert not _evict_all(cluster, ["drained-r1-0"])
        cluster.merge("InferenceModel", "drained", {"spec": {"availability": {"disruptionBudget": "None"}}})
        cluster.until(lambda: not cluster.list("PodDisruptionBudget"), "the end of the budgets")
        assert _evict_all(cluster, ["drained-r1-0"])
        cluster.until(lambda: cluster.condition("drained", "Degraded").get("reason") != "DrainBlocked", "its end")


def test_frontends_that_are_not_ready_do_not_block_a_drain(control_plane: LocalControlPlane) -> None:
    """In a suspended model no replica serves, so no frontend is ready."""
    with OperatedCluster(control_plane) as cluster, cluster.operator():
        cluster.hold = lambda name: "-frontend-" in name
        cluster.apply(pvc_model("idle", suspend=True, frontend={"replicas": 2}))
        selector = "app.kubernetes.io/component=frontend"
        pods = cluster.until(lambda: _two(cluster.list("Pod", selector)), "two frontends")
        for pod in pods:
            cluster.statuses[pod["metadata"]["name"]] = running_status(pod, ready=False)

        def judged() -> bool:
            budget = cluster.get("PodDisruptionBudget", "idle-frontend") or {}
            return bool(budget.get("status", {}).get("expectedPods") == 2)

        cluster.until(judged, "the budget's view of both")
        names = [pod["metadata"]["name"] for pod in pods]
        cluster.until(lambda: all(_runs(cluster, name) for name in names), "pods that run")
        assert _evict_all(cluster, names) == set(names)


def _two(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return found if len(found) == 2 else []


def _runs(cluster: OperatedCluster, pod: str) -> bool:
    live = cluster.get("Pod", pod)
    return live is not None and live["status"].get("phase") == "Running"


def _allowed(cluster: OperatedCluster, least: int) -> int:
    """Number of allowed evictions, once the budget requires this number of pods; -1 before."""
    budget: dict[str, Any] = cluster.get("PodDisruptionBudget", "drained-engine") or {"spec": {}, "metadata": {}}
    status = budget.get("status", {})
    current = status.get("observedGeneration") == budget["metadata"].get("generation")
    return status["disruptionsAllowed"] if current and budget["spec"].get("minAvailable") == least else -1
