"""Names of children that objects of other owners have, such as the endpoint of a model with a similar name."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl_operator.api.objects import Manifest
from minisgl_operator.render import names
from minisgl_operator.shell import controller
from minisgl_operator.shell.reconcile import Result, reconcile
from minisgl_operator.shell.store import ModelKey
from support.cluster.control_plane import LocalControlPlane
from support.cluster.operated_cluster import OperatedCluster, pvc_model


def test_a_replica_takes_no_name_of_another_model(control_plane: LocalControlPlane) -> None:
    with OperatedCluster(control_plane) as cluster, cluster.operator() as operator:
        cluster.apply(pvc_model("deepseek-r1"))
        cluster.apply(pvc_model("deepseek"))
        for name in ("deepseek-r1", "deepseek"):
            cluster.until(lambda name=name: cluster.ready(name), name)  # type: ignore[misc]
        cluster.until_quiet(operator)
        endpoint = cluster.get("Service", "deepseek-r1")
        assert endpoint is not None

        cluster.apply(pvc_model("deepseek", replicas=2))
        cluster.until(lambda: cluster.status("deepseek").get("readyReplicas") == 2, "both replicas")
        names_of_replicas = [each["name"] for each in cluster.status("deepseek")["replicaStatuses"]]
        assert names_of_replicas == ["deepseek-r0", "deepseek-r2"]
        cluster.until_quiet(operator)
        assert cluster.condition("deepseek", "Accepted")["status"] == "True"
        assert cluster.get("Service", "deepseek-r1") == endpoint
        assert cluster.ready("deepseek-r1")


def test_a_name_taken_by_another_model_is_a_conflict_until_it_is_free(control_plane: LocalControlPlane) -> None:
    with OperatedCluster(control_plane) as cluster, cluster.operator() as operator:
        cluster.apply(pvc_model("deepseek", replicas=2))
        cluster.until(lambda: cluster.status("deepseek").get("readyReplicas") == 2, "both replicas")
        cluster.until_quiet(operator)
        taken = cluster.get("Service", "deepseek-r1")

        cluster.apply(pvc_model("deepseek-r1"))
        cluster.until(lambda: cluster.condition("deepseek-r1", "Accepted").get("reason") == "Conflict", "the conflict")
        said = cluster.condition("deepseek-r1", "Accepted")["message"]
        assert 'Service "deepseek-r1"' in said and "InferenceModel deepseek" in said
        cluster.until_quiet(operator)
        assert cluster.get("Service", "deepseek-r1") == taken

        cluster.delete("InferenceModel", "deepseek")
        cluster.until(lambda: cluster.condition("deepseek-r1", "Accepted").get("status") == "True", "the free name")
        cluster.until(lambda: cluster.ready("deepseek-r1"), "Ready")


def test_a_conflict_is_rechecked_only_while_the_name_is_wanted(
    control_plane: LocalControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: dict[str, Result] = {}

    async def noted(shell: Any, key: ModelKey, *args: Any) -> Result:
        results[key.name] = await reconcile(shell, key, *args)
        return results[key.name]

    monkeypatch.setattr(controller, "reconcile", noted)
    with OperatedCluster(control_plane) as cluster, cluster.operator() as operator:
        # One name is taken by a child of another model, the other by an object that is in no watch.
        cluster.apply(pvc_model("deepseek-r1"))
        cluster.until(lambda: cluster.ready("deepseek-r1"), "the other model")
        labels = names.labels("deepseek-r1", names.ENGINE)
        cluster.apply(_policy("deepseek-engine", labels))
        cluster.apply(_policy("deepseek-frontend", {}))
        for _ in range(2):
            cluster.apply(pvc_model("deepseek", networkPolicy={"enabled": True}))
            cluster.until(lambda: cluster.condition("deepseek", "Accepted").get("reason") == "Conflict", "the conflict")
            cluster.until_quiet(operator)
            assert results["deepseek"].after is not None

            cluster.apply(pvc_model("deepseek", networkPolicy={"enabled": False}))
            cluster.until(lambda: cluster.condition("deepseek", "Accepted").get("status") == "True", "no conflict")
            cluster.until(lambda: cluster.ready("deepseek"), "Ready")
            cluster.until(lambda: results["deepseek"] == Result(), "rest")


def _policy(name: str, labels: dict[str, str]) -> Manifest:
    """A NetworkPolicy that selects no pod."""
    metadata = {"name": name, "labels": labels}
    spec = {"podSelector": {"matchLabels": {"mine": "yes"}}}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}
