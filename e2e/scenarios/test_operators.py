"""Two operators at the same time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

import pytest

from cluster.control_plane import kubectl
from harness import installation, writes
from harness.asking import ANSWER, ask
from harness.client import ClientPod
from harness.models import cpu_model
from harness.namespace import Namespace


@pytest.fixture
def two_operators(images: dict[str, str]) -> Iterator[None]:
    # Full lists at short intervals: what they find decides whether an idle operator writes.
    installation.install(images, {"operator.replicas": 2, "operator.resyncSeconds": 5})
    yield
    installation.install(images)


def holder() -> str:
    """Pod that holds the Lease; the identity of its process is the pod's name with a random suffix."""
    lease = json.loads(kubectl("-n", installation.NAMESPACE, "get", "lease", "minisgl-operator", "-o", "json"))
    return str(lease["spec"].get("holderIdentity", "")).rpartition("_")[0]


def operators() -> set[str]:
    names = kubectl("-n", installation.NAMESPACE, "get", "pods", f"--selector={installation.OPERATOR}", "-o", "name")
    return {name.removeprefix("pod/") for name in names.split()}


def test_only_the_holder_of_the_lease_writes_and_without_a_change_nothing_but_the_lease(
    namespace: Namespace, client: ClientPod, two_operators: None
) -> None:
    namespace.wait("the holder of the Lease among the operators", lambda: holder() in operators())
    namespace.wait("two operators", lambda: len(operators()) == 2)
    first, began = holder(), writes.position()
    namespace.apply(cpu_model("before"))
    namespace.wait_for_condition("before", "Ready")
    namespace.apply(cpu_model("demo", tensor=2))
    namespace.wait("its first pod", lambda: namespace.objects("pods", "app.kubernetes.io/instance=demo"))
    # The active operator is killed in the middle, as on a lost node: it does not release the Lease.
    installation.kill_operator(first)
    namespace.wait("another holder of the Lease", lambda: holder() not in ("", first))
    namespace.wait_for_condition("demo", "Ready")
    assert ask(client.openai("demo"), "demo") == ANSWER

    written = list(writes.of_operators(began))
    holds, workers = first, set()
    for write in written:
        if write.resource == "leases" and write.code == 200:
            holds = write.pod
        elif write.namespace == namespace.name:
            assert write.pod == holds, f"{write.pod} writes without the Lease, which {holds} holds: {write}"
            workers.add(write.pod)
    assert first in workers and len(workers) > 1
    made = Counter((write.resource, write.name) for write in written if write.code == 201 and write.verb == "patch")
    assert made[("statefulsets", "before-r0")] == made[("statefulsets", "demo-r0")] == 1
    assert set(made.values()) == {1}, "an object was created twice"
    writes.until_quiet(namespace)
