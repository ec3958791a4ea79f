"""Without changes, the operator writes nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import pytest

from harness import installation, writes
from harness.models import cpu_model
from harness.namespace import Namespace

SECONDS = 1800
MODELS = 20
SERVING = 2
"""Models that serve. The others are suspended and their frontends cannot be scheduled, so that all fit on a laptop."""


@pytest.fixture
def resync_every_30_seconds(images: dict[str, str]) -> Iterator[None]:
    installation.install(images, {"operator.resyncSeconds": 30})
    yield
    installation.install(images)


@pytest.mark.soak
def test_an_idle_operator_writes_nothing_but_its_lease(namespace: Namespace, resync_every_30_seconds: None) -> None:
    models = [cpu_model(f"m{i}") for i in range(SERVING)]
    for i in range(SERVING, MODELS):
        models.append(cpu_model(f"m{i}", suspend=True))
        models[-1]["spec"]["frontend"]["nodeSelector"] = {"e2e/no-such-node": "true"}
    namespace.apply(*models)
    for i in range(SERVING):
        namespace.wait_for_condition(f"m{i}", "Ready")

    def settled() -> bool:
        seen = [m.get("status", {}).get("observedGeneration") for m in namespace.objects("inferencemodels")]
        return None not in seen and len(namespace.objects("deployments")) == MODELS

    namespace.wait("the objects of all models", settled)
    writes.until_quiet(namespace)
    began = writes.position()
    time.sleep(SECONDS)  # the test observes this time
    written = Counter(writes.of_operators(began))
    leases = [write for write in written if write.resource == "leases"]
    assert leases, "the log shows no renewal of the Lease, and would show no other write"
    others = {write: count for write, count in written.items() if write not in leases}
    assert not others, "\n".join(f"{count} × {write}" for write, count in others.items())
    # Not before: Kubernetes itself writes to Deployments without progress for ten minutes.
    versions = _versions(namespace)
    namespace.apply(*models)
    # A restarted operator reconciles everything.
    installation.kill_operator()
    writes.until_quiet(namespace)
    assert _versions(namespace) == versions


def _versions(namespace: Namespace) -> dict[str, str]:
    kinds = (
        *("statefulsets", "deployments", "services", "networkpolicies"),
        *("poddisruptionbudgets", "serviceaccounts", "inferencemodels"),
    )
    return {
        f"{kind}/{found['metadata']['name']}": found["metadata"]["resourceVersion"]
        for kind in kinds
        for found in namespace.objects(kind)
    }
