"""Pods whose user the namespace assigns, as on OpenShift: one that no image knows, in group 0."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness import installation
from harness.asking import ANSWER, ask
from harness.client import ClientPod
from harness.hub import Hub
from harness.namespace import Namespace
from harness.restricted_v2 import USER, restricted_v2


@pytest.fixture
def assigned(images: dict[str, str], namespace: Namespace, client: ClientPod) -> Iterator[None]:
    """Assign a user to each pod of the namespace from now on; the client's pod has one."""
    with restricted_v2(namespace):
        yield
    installation.install(images)


def test_a_model_is_fetched_and_served_by_the_user_that_the_namespace_assigns(
    namespace: Namespace, client: ClientPod, hub: Hub, images: dict[str, str], assigned: None
) -> None:
    namespace.apply(hub.model(namespace, "demo"))
    found = namespace.wait_for_condition("demo", "Scheduled", "False", reason="PodRefused")
    assert "security context constraint" in found["message"], found
    installation.install(images, {"defaults.podIdentity": "Namespace", "defaults.engine.labels": {"team": "a"}})
    namespace.wait_for_condition("demo", "Ready")
    assert ask(client.openai("demo"), "demo") == ANSWER
    for component in ("engine", "frontend", "fetch"):
        pods = namespace.pods("demo", component)
        assert pods, component
        assert {pod["spec"]["securityContext"]["runAsUser"] for pod in pods} == {USER}
    assert {pod["metadata"]["labels"].get("team") for pod in namespace.pods("demo", "engine")} == {"a"}
