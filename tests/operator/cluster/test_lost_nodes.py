"""Pods on a lost node block neither a model nor its deletion; pods on a live node are never forced off it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from minisgl_operator.facts import lost_nodes
from minisgl_operator.facts.observed import NodeState
from minisgl_operator.shell import client, nodes, server_clock
from support.cluster.control_plane import LocalControlPlane
from support.cluster.operated_cluster import OperatedCluster, pvc_model


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_nodes, "FORCE_DELETE_AFTER", timedelta(seconds=3))


def hang(cluster: OperatedCluster) -> str:
    """A model whose pod was deleted, and whose node is ready but does not end it; returns the pod's uid."""
    cluster.apply(pvc_model("hangs"))
    cluster.until(lambda: cluster.ready("hangs"), "Ready")
    cluster.place_on_node("hangs-r0-0", ready=True)
    pod = cluster.get("Pod", "hangs-r0-0")
    assert pod is not None
    cluster.end_soon("hangs-r0-0")
    return str(pod["metadata"]["uid"])


def replaced(cluster: OperatedCluster, uid: str) -> bool:
    pod = cluster.get("Pod", "hangs-r0-0")
    return pod is not None and pod["metadata"]["uid"] != uid


def says(cluster: OperatedCluster, reason: str, *words: str) -> bool:
    found = cluster.condition("hangs", "EngineReady")
    return found.get("reason") == reason and all(word in found["message"] for word in words)


def test_a_pod_is_not_forced_off_a_live_node(control_plane: LocalControlPlane) -> None:
    """A process that hangs keeps its GPU. A user who says that the node is off has the pod replaced once the node is
    not ready."""
    with OperatedCluster(control_plane) as cluster, cluster.operator() as operator:
        uid = hang(cluster)
        words = ("Pod hangs-r0-0", cluster.node, "not deleted by force", "restart the node")
        cluster.until(lambda: says(cluster, "PodNotTerminating", *words), "the condition")
        cluster.until_quiet(operator)
        assert not replaced(cluster, uid)
        cluster.set_node(ready=True, tainted=True)
        cluster.until_quiet(operator)
        assert not replaced(cluster, uid)
        cluster.set_node(ready=False, tainted=True, since=datetime.now(UTC))
        cluster.until(lambda: replaced(cluster, uid), "another pod")


def test_an_operator_whose_clock_is_ahead_takes_no_silent_node_for_lost(
    control_plane: LocalControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = functools.partial(server_clock.ServerClock, wall=lambda: time.time() + 3600)
    monkeypatch.setattr(client, "ServerClock", ahead)
    with OperatedCluster(control_plane) as cluster, cluster.operator() as operator:
        uid = hang(cluster)
        cluster.set_node(ready=False, since=datetime.now(UTC))
        cluster.until(
            lambda: says(cluster, "NodeLost", "Pod hangs-r0-0", "is silent (Ready is Unknown)"), "the condition"
        )
        cluster.until_quiet(operator)
        assert not replaced(cluster, uid)


def test_a_node_that_has_returned_is_asked_before_a_pod_is_forced_off_it(
    control_plane: LocalControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch may be late: here it never reports that the node is ready again."""
    lost = NodeState("Unknown", datetime(2026, 1, 1, tzinfo=UTC))
    monkeypatch.setattr(nodes.NodeWatch, "nodes", property(lambda watch: {cluster.node: lost}))
    with OperatedCluster(control_plane) as cluster, cluster.operator() as operator:
        uid = hang(cluster)
        cluster.until(lambda: says(cluster, "NodeLost"), "the late news")
        cluster.until(lambda: asked(cluster), "the question")
        cluster.until_quiet(operator)
        assert not replaced(cluster, uid)


def asked(cluster: OperatedCluster) -> bool:
    """True if the operator has read the node."""
    wanted = ("minisgl-operator", "get", cluster.node)
    return any(
        (event.get("userAgent"), event["verb"], event.get("objectRef", {}).get("name")) == wanted
        for event in cluster.control_plane.audit()
    )


def test_a_deleted_node_has_its_pods_replaced(control_plane: LocalControlPlane) -> None:
    with OperatedCluster(control_plane) as cluster, cluster.operator():
        uid = hang(cluster)
        cluster.until(lambda: says(cluster, "PodNotTerminating"), "the condition")
        cluster.delete_node()
        cluster.until(lambda: replaced(cluster, uid), "another pod")


def lose_all(cluster: OperatedCluster) -> None:
    """A model whose pods are all on a node that is lost. Their grace period, of minutes, does not count."""
    cluster.apply(pvc_model("lost"))
    cluster.until(lambda: cluster.ready("lost"), "Ready")
    for pod in cluster.list("Pod"):
        cluster.place_on_lost_node(pod["metadata"]["name"])


WAYS: dict[str, Callable[[OperatedCluster], Any]] = {
    "in the foreground": lambda cluster: cluster.delete("InferenceModel", "lost", "Foreground"),
    "in the background": lambda cluster: cluster.delete("InferenceModel", "lost"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_deleted_model_is_removed_with_its_pods(control_plane: LocalControlPlane, way: str) -> None:
    with OperatedCluster(control_plane) as cluster, cluster.operator():
        lose_all(cluster)
        WAYS[way](cluster)
        cluster.until(lambda: not cluster.list("Pod"), "the end of all pods")
        cluster.until(lambda: cluster.get("InferenceModel", "lost") is None, "the model's end")


def test_an_operator_that_starts_later_removes_the_pods_of_a_deleted_model(
    control_plane: LocalControlPlane,
) -> None:
    with OperatedCluster(control_plane) as cluster:
        with cluster.operator():
            lose_all(cluster)
        cluster.delete("InferenceModel", "lost")
        with cluster.operator():
            cluster.until(lambda: not cluster.list("Pod"), "the end of all pods")


def test_a_namespace_with_a_model_can_be_deleted(control_plane: LocalControlPlane) -> None:
    with OperatedCluster(control_plane) as cluster, cluster.operator():
        lose_all(cluster)
        control_plane.kubectl("delete", "namespace", cluster.namespace, "--wait=false")
        # Once objects cannot be created any more, the operator does nothing more for the model.
        cluster.delete("Service", "lost")
        cluster.until(lambda: cluster.condition("lost", "Accepted").get("reason") == "NamespaceTerminating", "the end")

        def gone() -> bool:
            return control_plane.kubectl("get", "namespace", cluster.namespace, check=False).returncode != 0

        cluster.until(gone, "the namespace's end")


def test_a_pod_of_a_deleted_model_that_a_live_node_does_not_end_is_logged(
    control_plane: LocalControlPlane, caplog: pytest.LogCaptureFixture
) -> None:
    with OperatedCluster(control_plane) as cluster, cluster.operator() as operator:
        hang(cluster)
        cluster.delete("InferenceModel", "hangs")
        words = f"Pod {cluster.namespace}/hangs-r0-0 of a deleted model does not end, and its node {cluster.node}"
        cluster.until(lambda: words in caplog.text, "the warning")
        cluster.until_quiet(operator)
        assert cluster.get("Pod", "hangs-r0-0") is not None
