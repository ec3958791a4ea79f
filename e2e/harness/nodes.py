"""Nodes that are drained, lose their kubelet or fail, and are brought back at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from cluster import lifecycle
from cluster.control_plane import kubectl
from cluster.places import kill, stop, wait
from harness import installation

DRAIN: Final = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=600s")
OUT_OF_SERVICE: Final = "node.kubernetes.io/out-of-service"
_NOTICE: Final = 120.0
"""Timeout in seconds until the state of a node is noticed, which takes 16 s."""


def other_than(node: str) -> str:
    """The node of two that is not this one."""
    (other,) = set(names()) - {node}
    return other


def names() -> set[str]:
    return {node["metadata"]["name"] for node in json.loads(kubectl("get", "nodes", "-o", "json"))["items"]}


def of_operator() -> str:
    """Node of the operator."""
    selector = f"--selector={installation.OPERATOR}"
    pods = json.loads(kubectl("-n", installation.NAMESPACE, "get", "pods", selector, "-o", "json"))["items"]
    (pod,) = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    return str(pod["spec"]["nodeName"])


def of_pods(pods: list[dict[str, Any]]) -> dict[str, str]:
    """Node of each pod, by the pod's name."""
    return {pod["metadata"]["name"]: pod["spec"].get("nodeName", "") for pod in pods}


@contextmanager
def drained(node: str) -> Iterator[None]:
    """Drain a node as users do, but for pods of clients, which no controller would create again."""
    try:
        kubectl("drain", node, *DRAIN, "--pod-selector=app!=client")
        yield
    finally:
        kubectl("uncordon", node)


@contextmanager
def without_kubelet(node: str) -> Iterator[None]:
    """Kill a kubelet, whose containers continue, and wait until the node is NotReady."""
    stop("kubelet", node, seconds=0)
    with _not_ready(node):
        yield


@contextmanager
def powered_off(node: str) -> Iterator[None]:
    """Kill a node with all its processes, and wait until it is NotReady."""
    kill(node)
    with _not_ready(node):
        yield


@contextmanager
def _not_ready(node: str) -> Iterator[None]:
    """Wait until a node whose kubelet was killed is NotReady; bring it back afterwards."""
    try:
        _wait_for_ready(node, "Unknown")
        yield
    finally:
        lifecycle.up()
        _wait_for_ready(node, "True")


@contextmanager
def out_of_service(node: str) -> Iterator[None]:
    """Declare a node as lost with the taint that administrators set by hand."""
    taint = f"{OUT_OF_SERVICE}=nodeshutdown:NoExecute"
    kubectl("taint", "node", node, taint)
    try:
        yield
    finally:
        kubectl("taint", "node", node, f"{OUT_OF_SERVICE}-")


@contextmanager
def devices(node: str, resource: str, count: int) -> Iterator[None]:
    """Advertise devices of a node that no device plugin manages."""
    path = f"/status/capacity/{resource.replace('/', '~1')}"

    def change(operation: dict[str, str]) -> None:
        patch = json.dumps([{"path": path, **operation}])
        kubectl("patch", "node", node, "--subresource=status", "--type=json", "-p", patch)

    change({"op": "add", "value": str(count)})
    try:
        yield
    finally:
        change({"op": "remove"})


def _wait_for_ready(node: str, status: str) -> None:
    def found() -> bool:
        conditions = json.loads(kubectl("get", "node", node, "-o", "json"))["status"]["conditions"]
        return any(c["type"] == "Ready" and c["status"] == status for c in conditions)

    wait(f"Ready={status} of {node}", found, _NOTICE)
