"""The control plane that the other tests here use."""

from __future__ import annotations

from support.cluster.control_plane import LocalControlPlane


def test_owned_objects_are_garbage_collected_and_requests_are_recorded(control_plane: LocalControlPlane) -> None:
    control_plane.kubectl("create", "namespace", "collected")
    control_plane.kubectl("-n", "collected", "create", "configmap", "owner")
    uid = control_plane.kubectl("-n", "collected", "get", "configmap", "owner", "-o", "jsonpath={.metadata.uid}").stdout
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": uid}
    child = {"name": "child", "namespace": "collected", "ownerReferences": [owner]}
    control_plane.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": child})
    control_plane.kubectl("-n", "collected", "delete", "configmap", "owner")
    control_plane.kubectl("-n", "collected", "wait", "--for=delete", "configmap/child", "--timeout=60s")
    verbs = {
        (event["verb"], event["objectRef"].get("name"))
        for event in control_plane.audit()
        if event.get("objectRef", {}).get("namespace") == "collected"
    }
    assert {("delete", "owner"), ("delete", "child")} <= verbs


def test_an_unlisted_permission_is_denied(control_plane: LocalControlPlane) -> None:
    kubeconfig = control_plane.kubeconfig_for("nobody-in-particular")
    refused = control_plane.kubectl("--kubeconfig", str(kubeconfig), "get", "pods", check=False)
    assert refused.returncode != 0
    assert "forbidden" in refused.stderr
