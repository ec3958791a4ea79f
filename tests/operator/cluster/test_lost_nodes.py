"""Pods on a lost node block neither a model nor its deletion."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from minisgl_operator.facts import lost_nodes
from support.cluster.control_plane import LocalControlPlane
from support.cluster.operated_cluster import OperatedCluster, pvc_model


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_nodes, "FORCE_DELETE_AFTER", timedelta(seconds=3))


def lose_all(cluster: OperatedCluster) -> None:
    """A model whose pods are all on a node that does not report any more."""
    cluster.apply(pvc_model("lost"))
    cluster.until(lambda: cluster.ready("lost"), "Ready")
    for pod in cluster.list("Pod"):
        cluster.place_on_lost_node(pod["metadata"]["name"])


def told_to_end(cluster: OperatedCluster) -> None:
    """Wait until all pods are deleted, with a grace period that ends soon."""

    def deleted() -> list[dict[str, Any]]:
        found = cluster.list("Pod")
        return found if all("deletionTimestamp" in pod["metadata"] for pod in found) else []

    for pod in cluster.until(deleted, "deleted pods"):
        cluster.end_soon(pod["metadata"]["name"])


WAYS: dict[str, Callable[[OperatedCluster], Any]] = {
    "in the foreground": lambda cluster: cluster.delete("InferenceModel", "lost", "Foreground"),
    "in the background": lambda cluster: cluster.delete("InferenceModel", "lost"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_deleted_model_is_removed_with_its_pods(control_plane: LocalControlPlane, way: str) -> None:
    with OperatedCluster(control_plane) as cluster, cluster.operator():
        lose_all(cluster)
        WAYS[way](cluster)
        told_to_end(cluster)
        cluster.until(lambda: not cluster.list("Pod"), "the end of all pods")
        cluster.until(lambda: cluster.get("InferenceModel", "lost") is None, "the model's end")


def test_an_operator_that_starts_later_removes_the_pods_of_a_deleted_model(
    control_plane: LocalControlPlane,
) -> None:
    with OperatedCluster(control_plane) as cluster:
        with cluster.operator():
            lose_all(cluster)
        cluster.delete("InferenceModel", "lost")
        told_to_end(cluster)
        with cluster.operator():
            cluster.until(lambda: not cluster.list("Pod"), "the end of all pods")


def test_a_namespace_with_a_model_can_be_deleted(control_plane: LocalControlPlane) -> None:
    with OperatedCluster(control_plane) as cluster, cluster.operator():
        lose_all(cluster)
        control_plane.kubectl("delete", "namespace", cluster.namespace, "--wait=false")
        # Once objects cannot be created any more, the operator does nothing more for the model.
        cluster.delete("Service", "lost")
        cluster.until(lambda: cluster.condition("lost", "Accepted").get("reason") == "NamespaceTerminating", "the end")
        told_to_end(cluster)

        def gone() -> bool:
            return control_plane.kubectl("get", "namespace", cluster.namespace, check=False).returncode != 0

        cluster.until(gone, "the namespace's end")
