"""Pods of a model in a namespace with a LimitRange, on a real API server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from minisgl_operator.api.conditions import Reason
from minisgl_operator.facts.pod_failures import creation_failure
from minisgl_operator.render import names, render
from support.cluster.control_plane import LocalControlPlane
from support.cluster.inference_models import DEFAULTS, inference_model

NAMESPACE = "limited"
# As their controllers name them.
PODS = {
    names.ENGINE: {"name": "a-frontend-x-r0-0"},
    names.FRONTEND: {"generateName": "a-frontend-x-frontend-6d5f7b9c4d-"},
    names.FETCH: {"generateName": "a-frontend-x-fetch-35d630cdda6b6a85-"},
}


def pods(spec: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Component and JSON of each pod of a model on CPUs."""
    model = inference_model({"engine": {"device": "cpu"}, **spec}, name="a-frontend-x")
    for manifest in render(model, DEFAULTS):
        template = manifest.get("spec", {}).get("template")
        if template is not None:
            component = template["metadata"]["labels"][names.COMPONENT_LABEL]
            metadata = {**template["metadata"], **PODS[component]}
            del template["spec"]["serviceAccountName"]
            body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
            yield component, json.dumps(body)


@pytest.fixture(scope="module")
def limited(control_plane: LocalControlPlane) -> LocalControlPlane:
    limits = [{"type": "Container", "default": {"cpu": "1", "memory": "128Mi"}}]
    control_plane.kubectl("create", "namespace", NAMESPACE)
    control_plane.apply(
        {
            "apiVersion": "v1",
            "kind": "LimitRange",
            "metadata": {"name": "small", "namespace": NAMESPACE},
            "spec": {"limits": limits},
        },
        # Pods need it, and no controller may have created it yet.
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": NAMESPACE}},
    )
    return control_plane


def _create(cluster: LocalControlPlane, pod: str) -> Any:
    return cluster.kubectl("create", "-n", NAMESPACE, "--dry-run=server", "-f", "-", stdin=pod, check=False)


def test_a_request_above_the_default_limit_is_named_by_its_field(limited: LocalControlPlane) -> None:
    seen = set()
    for component, pod in pods({}):
        failure = creation_failure([_create(limited, pod).stderr.strip()])
        assert failure is not None and failure.reason == Reason.POD_REFUSED
        assert failure.subject == f"spec.{component}.resources.requests.memory"
        assert "memory limit of 128Mi" in failure.message
        seen.add(component)
    assert seen == set(PODS)


def test_pods_with_requests_within_the_limit_are_accepted(limited: LocalControlPlane) -> None:
    small = {"resources": {"requests": {"memory": "64Mi"}}}
    for _, pod in pods({"engine": {"device": "cpu", **small}, "frontend": small, "fetch": small}):
        done = _create(limited, pod)
        assert done.returncode == 0, done.stderr
