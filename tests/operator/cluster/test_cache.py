"""The PVC of the cache on a real API server, which decides about changes of its size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.cluster.control_plane import LocalControlPlane
from support.cluster.operated_cluster import OperatedCluster, hub_model


@pytest.fixture(scope="module")
def cluster(control_plane: LocalControlPlane) -> Iterator[OperatedCluster]:
    for name, expands in (("expands", True), ("rigid", False)):
        control_plane.apply(
            {
                "apiVersion": "storage.k8s.io/v1",
                "kind": "StorageClass",
                "metadata": {"name": name},
                "provisioner": "kubernetes.io/no-provisioner",
                "allowVolumeExpansion": expands,
            }
        )
    with OperatedCluster(control_plane) as cluster, cluster.operator():
        yield cluster


def model(name: str, storage_class: str, size: str) -> dict[str, Any]:
    made = hub_model(name)
    made["spec"]["model"]["cache"] = {"size": size, "storageClassName": storage_class, "retain": True}
    return made


def make_bound(cluster: OperatedCluster, model: dict[str, Any]) -> None:
    """The volume is created first, so that the claim is bound immediately."""
    name, cache = model["metadata"]["name"], model["spec"]["model"]["cache"]
    reference = {"kind": "PersistentVolumeClaim", "namespace": cluster.namespace, "name": f"{name}-cache"}
    cluster.control_plane.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"{cluster.namespace}-{name}"},
            "spec": {
                "capacity": {"storage": "1Ti"},
                "accessModes": ["ReadWriteMany"],
                "storageClassName": cache["storageClassName"],
                "claimRef": reference,
                "hostPath": {"path": "/nowhere"},
            },
        }
    )
    cluster.apply(model)

    def bound() -> bool:
        live = cluster.get("PersistentVolumeClaim", f"{name}-cache")
        return live is not None and live["status"].get("phase") == "Bound"

    cluster.until(bound, "a bound claim")


def size(cluster: OperatedCluster, name: str) -> str:
    live = cluster.get("PersistentVolumeClaim", f"{name}-cache")
    return "" if live is None else str(live["spec"]["resources"]["requests"]["storage"])


def accepted(cluster: OperatedCluster, name: str) -> str:
    """Status of the condition Accepted for the current spec."""
    condition, live = cluster.condition(name, "Accepted"), cluster.get("InferenceModel", name)
    assert live is not None
    return str(condition.get("status")) if condition.get("observedGeneration") == live["metadata"]["generation"] else ""


def test_a_pvc_is_expanded_and_a_larger_one_keeps_its_size(cluster: OperatedCluster) -> None:
    make_bound(cluster, model("grows", "expands", "1Gi"))
    cluster.apply(model("grows", "expands", "2Gi"))
    cluster.until(lambda: size(cluster, "grows") == "2Gi", "the larger claim")
    cluster.merge("PersistentVolumeClaim", "grows-cache", {"spec": {"resources": {"requests": {"storage": "5Gi"}}}})
    cluster.apply(model("grows", "expands", "3Gi"))
    cluster.until(lambda: accepted(cluster, "grows") == "True", "a spec that is served")
    assert size(cluster, "grows") == "5Gi"


def test_a_retained_larger_pvc_is_used_unchanged(cluster: OperatedCluster) -> None:
    make_bound(cluster, model("kept", "expands", "4Gi"))
    cluster.until(lambda: accepted(cluster, "kept") == "True" and cluster.get("Service", "kept"), "the model")
    claim = cluster.get("PersistentVolumeClaim", "kept-cache")
    assert claim is not None and "app.kubernetes.io/instance" not in claim["metadata"]["labels"]
    cluster.delete("InferenceModel", "kept")
    cluster.until(lambda: cluster.get("Service", "kept") is None, "the end of the other children")
    cluster.apply(model("kept", "expands", "1Gi"))
    cluster.until(lambda: accepted(cluster, "kept") == "True" and cluster.get("Service", "kept"), "the model again")
    assert size(cluster, "kept") == "4Gi"


def test_a_claim_that_is_retained_later_loses_its_owner_and_the_label_of_an_application(
    cluster: OperatedCluster,
) -> None:
    def metadata() -> dict[str, Any]:
        claim = cluster.get("PersistentVolumeClaim", "later-cache")
        assert claim is not None
        return dict(claim["metadata"])

    owned = model("later", "expands", "1Gi")
    owned["spec"]["model"]["cache"]["retain"] = False
    make_bound(cluster, owned)
    assert metadata()["labels"]["app.kubernetes.io/instance"] == "later" and metadata()["ownerReferences"]
    cluster.apply(model("later", "expands", "1Gi"))
    cluster.until(lambda: "ownerReferences" not in metadata(), "a claim without an owner")
    assert "app.kubernetes.io/instance" not in metadata()["labels"], "Argo CD would prune it with this label"
    assert metadata()["labels"]["serving.minisgl.io/model"] == "later"


def test_a_failed_expansion_is_reported_with_its_remedy(cluster: OperatedCluster) -> None:
    make_bound(cluster, model("rigid", "rigid", "1Gi"))
    cluster.apply(model("rigid", "rigid", "2Gi"))
    cluster.wait_as_users_do("rigid", "Stalled")
    assert cluster.health("rigid") == "Failed"
    condition = cluster.condition("rigid", "Accepted")
    assert condition["reason"] == "Rejected", condition
    assert "cannot be expanded" in condition["message"] and "allowVolumeExpansion" in condition["message"]
    assert size(cluster, "rigid") == "1Gi"


def test_a_pvc_rejected_by_the_namespace_is_reported_with_the_servers_message(cluster: OperatedCluster) -> None:
    limit = {"type": "PersistentVolumeClaim", "max": {"storage": "50Gi"}}
    metadata = {"name": "small-claims", "namespace": cluster.namespace}
    cluster.control_plane.apply(
        {"apiVersion": "v1", "kind": "LimitRange", "metadata": metadata, "spec": {"limits": [limit]}}
    )
    cluster.apply(hub_model("forbidden"))
    condition = cluster.until(lambda: _refused(cluster, "forbidden"), "the refusal")
    assert condition["reason"] == "Rejected"
    assert "maximum storage usage per PersistentVolumeClaim is 50Gi" in condition["message"]
    cluster.control_plane.kubectl("delete", "limitrange", "small-claims", "-n", cluster.namespace)


def _refused(cluster: OperatedCluster, name: str) -> dict[str, Any]:
    condition = cluster.condition(name, "Accepted")
    return condition if condition.get("status") == "False" else {}
