"""Nobody changes anything: the operator writes nothing."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.control_plane import PLANE
from harness import installation
from harness.models import cpu_model
from harness.namespace import Namespace

MODELS = 20
SERVING = 2
"""The others are suspended, and no node is good enough for their frontends: all of them would not fit on a laptop."""
ACCOUNT = f"system:serviceaccount:{installation.NAMESPACE}:"
WRITES = ("create", "update", "patch", "delete", "deletecollection")


@pytest.fixture
def resync_every_30_seconds(images: dict[str, str]) -> Iterator[None]:
    installation.install(images, {"operator.resyncSeconds": 30})
    yield
    installation.install(images)


@pytest.mark.parametrize("seconds", [180, pytest.param(1800, marks=pytest.mark.soak)])
def test_an_idle_operator_writes_nothing_but_its_lease(
    namespace: Namespace, resync_every_30_seconds: None, seconds: int
) -> None:
    models = [cpu_model(f"m{i}") for i in range(SERVING)]
    for i in range(SERVING, MODELS):
        models.append(cpu_model(f"m{i}", suspend=True))
        models[-1]["spec"]["frontend"]["nodeSelector"] = {"e2e/no-such-node": "true"}
    namespace.apply(*models)
    for i in range(SERVING):
        namespace.wait_for_condition(f"m{i}", "Ready", seconds=300)

    def settled() -> bool:
        seen = [m.get("status", {}).get("observedGeneration") for m in namespace.objects("inferencemodels")]
        return None not in seen and len(namespace.objects("deployments")) == MODELS

    namespace.wait("the objects of all models", settled, 120)
    versions = _versions(namespace)
    offset = PLANE.audit_log.stat().st_size
    time.sleep(seconds)  # what is measured is this time
    written = Counter(
        f"{event['verb']} {event['objectRef'].get('resource')}"
        for event in _events(offset)
        if event["user"]["username"].startswith(ACCOUNT) and event["verb"] in WRITES
    )
    assert set(written) <= {"update leases", "patch leases"}, written
    namespace.apply(*models)
    assert _versions(namespace) == versions


def _versions(namespace: Namespace) -> dict[str, str]:
    kinds = ("statefulset", "service", "networkpolicy", "pdb", "serviceaccount", "inferencemodel")
    return {
        f"{kind}/{found['metadata']['name']}": found["metadata"]["resourceVersion"]
        for kind in kinds
        for found in namespace.objects(kind)
    }


def _events(offset: int) -> list[dict[str, Any]]:
    with PLANE.audit_log.open() as log:
        log.seek(offset)
        return [json.loads(line) for line in log if line.endswith("}\n")]
