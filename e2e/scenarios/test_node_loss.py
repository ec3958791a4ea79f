"""Nodes that never come back, and pods that do not end, while streams and new requests run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import pytest

from harness import nodes, writes
from harness.client import ClientPod
from harness.hung import hung
from harness.models import spread_model
from harness.namespace import Namespace
from harness.traffic import traffic

pytestmark = pytest.mark.soak

GPU: Final = "e2e.minisgl.io/gpu"
LEAVE_SOON: Final = [
    {"key": f"node.kubernetes.io/{state}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}
    for state in ("unreachable", "not-ready")
]
"""Tolerations with which pods of a lost node are deleted after 5 seconds instead of 5 minutes."""


@pytest.fixture
def client(images: dict[str, str], namespace: Namespace, victim: str) -> ClientPod:
    """Client on the other node."""
    return ClientPod.create(namespace, images["frontend"], node=nodes.other_than(victim))


@pytest.fixture
def one_device_each(images: dict[str, str]) -> Iterator[None]:
    """One device of the resource GPU on each node."""
    with ExitStack() as stack:
        for node in nodes.names():
            stack.enter_context(nodes.devices(node, GPU, 1))
        yield


def apply_spread(namespace: Namespace, *, devices: bool = False) -> None:
    """Apply the model "demo" with a replica and a frontend on each node, and wait until it serves."""
    model = spread_model("demo", drainSeconds=1)
    model["spec"]["engine"]["tolerations"] = LEAVE_SOON
    if devices:
        resources = model["spec"]["engine"]["resources"]
        resources["requests"] = resources["requests"] | {GPU: "1"}
        resources["limits"] = {GPU: "1"}
    namespace.apply(model)
    namespace.wait("two replicas", lambda: _ready_replicas(namespace) == 2)
    namespace.wait_for_condition("demo", "Ready")
    for component in ("engine", "frontend"):
        placed = nodes.of_pods(namespace.pods("demo", component))
        assert set(placed.values()) == nodes.names(), placed


def _ready_replicas(namespace: Namespace) -> int:
    return int(namespace.status("demo").get("readyReplicas", 0))


def _engine_nodes(namespace: Namespace) -> set[str]:
    return set(nodes.of_pods(namespace.pods("demo", "engine")).values())


def engine_on(namespace: Namespace, node: str) -> dict[str, Any]:
    (pod,) = [pod for pod in namespace.pods("demo", "engine") if pod["spec"]["nodeName"] == node]
    return pod


@contextmanager
def nothing_more(node: str) -> Iterator[None]:
    yield


@pytest.mark.parametrize("declared", [nothing_more, nodes.out_of_service], ids=["not-ready", "out-of-service"])
def test_pods_of_a_lost_node_are_created_again_on_another(
    namespace: Namespace,
    client: ClientPod,
    victim: str,
    declared: Callable[[str], Any],
    measurement: Callable[[str], None],
) -> None:
    apply_spread(namespace)
    lost = engine_on(namespace, victim)
    (frontend,) = [pod for pod in namespace.pods("demo", "frontend") if pod["spec"]["nodeName"] != victim]
    with (
        traffic(client.service_url("demo"), short=1, retry=True) as sent,
        traffic(client.pod_url(frontend), short=1) as surviving,
    ):
        began = time.monotonic()
        with nodes.powered_off(victim), declared(victim):
            # The status still counts a lost replica until the operator notices.
            namespace.wait("no replica on the lost node", lambda: victim not in _engine_nodes(namespace))
            namespace.wait("two replicas on the other node", lambda: _ready_replicas(namespace) == 2)
            measurement(f"a lost node to two ready replicas: {time.monotonic() - began:.0f} s")
            assert victim not in _engine_nodes(namespace)
        namespace.wait_for_condition("demo", "Ready")
    found = namespace.get("pods", lost["metadata"]["name"])
    assert found is not None and found["metadata"]["uid"] != lost["metadata"]["uid"]
    measurement(f"a lost node: {sent.summary()}; at the other frontend: {surviving.summary()}")
    sent.check(frontend_lost=True)
    surviving.check()


def test_a_pod_with_a_hung_process_keeps_its_device(
    namespace: Namespace, client: ClientPod, victim: str, one_device_each: None, measurement: Callable[[str], None]
) -> None:
    apply_spread(namespace, devices=True)
    stuck = engine_on(namespace, victim)
    name, uid = stuck["metadata"]["name"], stuck["metadata"]["uid"]
    began = writes.position()
    with traffic(client.service_url("demo")) as sent:
        with hung(stuck):
            namespace.kubectl("delete", "pod", name, "--wait=false")
            found = namespace.wait_for_condition("demo", "EngineReady", "False", reason="PodNotTerminating")
            assert name in found["message"] and victim in found["message"], found
            sent.wait_for_answers()
            still = namespace.get("pods", name)
            assert still is not None and still["metadata"]["uid"] == uid, "its device was given to another pod"
        namespace.wait("another pod", lambda: (namespace.get("pods", name) or stuck)["metadata"]["uid"] != uid)
        namespace.wait("two replicas", lambda: _ready_replicas(namespace) == 2)
    deleted = [write for write in writes.of_operators(began) if (write.resource, write.name) == ("pods", name)]
    assert not deleted, "the operator removed a pod from a node that is alive"
    measurement(f"a hung process: {sent.summary()}")
    sent.check()
