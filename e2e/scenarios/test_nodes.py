"""Nodes that are drained or lost while a stream and new requests run."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from harness import nodes
from harness.client import ClientPod
from harness.models import cpu_model, spread_model
from harness.namespace import Namespace
from harness.traffic import traffic


@pytest.fixture
def safe_client(images: dict[str, str], namespace: Namespace, victim: str) -> ClientPod:
    """Client on the other node."""
    return ClientPod.create(namespace, images["frontend"], node=nodes.other_than(victim))


def apply_spread(namespace: Namespace, **spec: Any) -> None:
    """Apply the model "demo" with a replica and a frontend on each node, and wait until it serves."""
    namespace.apply(spread_model("demo", **spec))
    namespace.wait("two replicas", lambda: namespace.status("demo").get("readyReplicas") == 2)
    namespace.wait_for_condition("demo", "Ready")
    for component in ("engine", "frontend"):
        placed = nodes.of_pods(namespace.pods("demo", component))
        assert set(placed.values()) == nodes.names(), placed


def uids(namespace: Namespace, component: str) -> dict[str, str]:
    """UID of each pod of this component of the model, by its name."""
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in namespace.pods("demo", component)}


def test_a_kubelet_comes_back_and_a_drained_node_loses_no_request(
    namespace: Namespace, safe_client: ClientPod, victim: str, measurement: Callable[[str], None]
) -> None:
    # A long answer takes longer than 10 s on a machine that is busy.
    apply_spread(namespace, drainSeconds=60)
    engines, frontends = uids(namespace, "engine"), uids(namespace, "frontend")
    with traffic(safe_client.service_url("demo")) as sent:
        with nodes.without_kubelet(victim):
            began = time.monotonic()
            sent.wait_for_answers()
        away = time.monotonic() - began
        namespace.wait("two replicas again", lambda: namespace.status("demo").get("readyReplicas") == 2)
        namespace.wait_for_condition("demo", "Ready")
        assert uids(namespace, "engine") == engines
        # A frontend leaves a node that is not ready for 30 s, as long as a busy machine may take for the answers.
        assert uids(namespace, "frontend") == frontends or away > 25
        restarts = [s["restartCount"] for p in namespace.objects("pods") for s in p["status"]["containerStatuses"]]
        assert not any(restarts)
        with nodes.drained(victim):
            left = namespace.objects("pods", "app.kubernetes.io/instance=demo")
            assert victim not in nodes.of_pods(left).values()
            namespace.wait("two replicas again", lambda: namespace.status("demo").get("readyReplicas") == 2)
            namespace.wait_for_condition("demo", "Ready")
    measurement(f"a killed kubelet, then a drained node: {sent.summary()}")
    sent.check()


@pytest.mark.soak
def test_a_drain_without_room_elsewhere_names_its_budget_and_ends_without_budgets(
    namespace: Namespace, victim: str
) -> None:
    model = cpu_model("demo", replicas=2)
    model["spec"]["engine"]["nodeSelector"] = {"kubernetes.io/hostname": victim}
    namespace.apply(model)
    namespace.wait("two replicas", lambda: namespace.status("demo").get("readyReplicas") == 2)

    def placed() -> list[str]:
        return [node for node in nodes.of_pods(namespace.pods("demo", "engine")).values() if node]

    def drain() -> None:
        with nodes.drained(victim):
            assert not placed()

    with ThreadPoolExecutor(1) as pool:
        drained = pool.submit(drain)
        found = namespace.wait_for_condition("demo", "Degraded", reason="DrainBlocked")
        assert "demo-engine" in found["message"] and victim in found["message"], found
        assert placed() == [victim], "the budget keeps the last replica"
        namespace.patch("inferencemodel", "demo", {"spec": {"availability": {"disruptionBudget": "None"}}})
        drained.result()
    namespace.wait("two replicas again", lambda: namespace.status("demo").get("readyReplicas") == 2)
    namespace.wait("no fault", lambda: namespace.condition("demo", "Degraded")["status"] == "False")
