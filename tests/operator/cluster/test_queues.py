"""The samples for Kueue and Volcano on a real API server, by server-side dry run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from minisgl_operator.api.types import InferenceModel
from minisgl_operator.render import names, render
from support.cluster.chart import MANIFESTS
from support.cluster.control_plane import LocalControlPlane
from support.cluster.inference_models import DEFAULTS

QUEUES = MANIFESTS / "queues"
NAMESPACE = "queues"


@pytest.fixture(scope="module")
def namespace(control_plane: LocalControlPlane) -> Iterator[str]:
    control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-k", str(MANIFESTS / "crd"))
    metadata = {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/warn": "restricted"}}
    control_plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    yield NAMESPACE


def dry_run(control_plane: LocalControlPlane, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The object as the API server would store it, and its warnings."""
    arguments = ("create", "--dry-run=server", "--validate=strict", "-n", NAMESPACE, "-o", "json", "-f", "-")
    done = control_plane.kubectl(*arguments, stdin=json.dumps(body))
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("name", ["kueue", "volcano"])
def test_samples_and_their_stateful_sets_are_accepted(
    control_plane: LocalControlPlane, namespace: str, name: str
) -> None:
    stored, _ = dry_run(control_plane, yaml.safe_load((QUEUES / f"{name}.yaml").read_text()))
    model = InferenceModel.parse(stored)
    replicas = [each for each in render(model, DEFAULTS) if each["kind"] == "StatefulSet"]
    assert len(replicas) == 2
    for replica in replicas:
        del replica["metadata"]["ownerReferences"]
        live, warnings = dry_run(control_plane, replica)
        assert "would violate" not in warnings
        if name == "kueue":
            assert live["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
        else:
            assert live["spec"]["template"]["spec"]["schedulerName"] == "volcano"
            assert live["metadata"]["annotations"][names.VOLCANO_MIN_MEMBER] == "8"
