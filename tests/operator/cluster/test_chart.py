"""The chart, the kustomize tree and the samples on a real API server."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from minisgl.version import __version__
from support.cluster.chart import (
    CHART,
    MANIFESTS,
    MATRIX,
    NAMESPACE,
    SAMPLES,
    Object,
    helm,
    kustomized,
    pods,
    rendered,
)
from support.cluster.control_plane import LocalControlPlane
from support.cluster.http_routes import http_routes

RESTRICTED = "restricted-for-the-chart"


@pytest.fixture(scope="module")
def installed(control_plane: LocalControlPlane) -> LocalControlPlane:
    """A cluster with the kustomize tree, whose objects the chart adopts."""
    control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-k", str(MANIFESTS))
    control_plane.kubectl("create", "namespace", RESTRICTED)
    control_plane.kubectl("label", "namespace", RESTRICTED, "pod-security.kubernetes.io/enforce=restricted")
    return control_plane


def test_rendered_pods_comply_with_the_restricted_profile(installed: LocalControlPlane) -> None:
    tried = []
    for pod in [*(pod for values in MATRIX.values() for pod in pods(rendered(values))), *pods(kustomized())]:
        spec = {key: value for key, value in pod.items() if key not in ("serviceAccountName", "priorityClassName")}
        metadata = {"name": f"tried-{len(tried)}", "namespace": RESTRICTED}
        tried.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    installed.try_out(tried)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_samples_are_accepted(installed: LocalControlPlane, path: Path) -> None:
    # Not for good: tests of routes begin without the kind, on the same API server.
    with http_routes(installed) if "HTTPRoute" in path.read_text() else nullcontext():
        installed.kubectl("create", "--dry-run=server", "--validate=strict", "-f", str(path))


def test_the_operator_has_exactly_the_permissions_that_it_uses(installed: LocalControlPlane) -> None:
    def may(verb: str, resource: str, *more: str, namespace: str = "default") -> bool:
        user = f"system:serviceaccount:{NAMESPACE}:minisgl-operator"
        asked = installed.kubectl("auth", "can-i", verb, resource, *more, "-n", namespace, f"--as={user}", check=False)
        return asked.stdout.strip() == "yes"

    assert may("patch", "statefulsets.apps")
    assert may("patch", "inferencemodels.serving.minisgl.io", "--subresource=status")
    lease = "leases.coordination.k8s.io/minisgl-operator"
    assert may("update", lease, namespace=NAMESPACE)
    assert not may("update", lease)
    assert not may("update", "leases.coordination.k8s.io/of-another-release", namespace=NAMESPACE)
    assert not may("patch", "inferencemodels.serving.minisgl.io")
    assert may("get", "nodes") and may("watch", "nodes")
    assert not may("patch", "nodes")
    assert may("create", "secrets") and may("update", "secrets")
    for verb in ("get", "list", "watch", "patch", "delete"):
        assert not may(verb, "secrets")
    assert may("create", "pods"), "for dry runs"
    assert not may("patch", "pods") and not may("create", "pods", "--subresource=exec")


def test_view_and_edit_roles_include_the_models(installed: LocalControlPlane) -> None:
    def rules(role: str) -> list[Object]:
        found = json.loads(installed.kubectl("get", "clusterrole", role, "-o", "json").stdout)["rules"]
        return [rule for rule in found if rule["apiGroups"] == ["serving.minisgl.io"]]

    end = time.monotonic() + 90
    while not rules("view") or not rules("edit"):
        assert time.monotonic() < end, "the controller did not aggregate the roles"
    assert {verb for rule in rules("view") for verb in rule["verbs"]} == {"get", "list", "watch"}
    assert {"create", "delete", "patch"} <= {verb for rule in rules("edit") for verb in rule["verbs"]}


def test_helm_installs_upgrades_and_uninstalls(control_plane: LocalControlPlane) -> None:
    place = [f"--kubeconfig={control_plane.kubeconfig}", "--namespace=helm-release"]
    values = {"fullnameOverride": "by-helm", "crds": {"enabled": False}}
    helm("install", "minisgl", str(CHART), *place, "--create-namespace", values=values)
    image = [
        "get",
        "deployment",
        "by-helm",
        "-n",
        "helm-release",
        "-o",
        "jsonpath={.spec.template.spec.containers[0].image}",
    ]
    assert control_plane.kubectl(*image).stdout == f"minisgl/operator:{__version__}"
    helm("upgrade", "minisgl", str(CHART), *place, values=values | {"operator": {"image": {"tag": "0.2.1"}}})
    assert control_plane.kubectl(*image).stdout == "minisgl/operator:0.2.1"
    helm("uninstall", "minisgl", *place)
    left = control_plane.kubectl(
        "get", "deployments,services,networkpolicies,roles", "-n", "helm-release", "-o", "name"
    )
    assert left.stdout == ""
    roles = control_plane.kubectl("get", "clusterroles,clusterrolebindings", "-o", "name").stdout
    assert "by-helm" not in roles
