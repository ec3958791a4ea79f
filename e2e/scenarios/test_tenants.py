"""Namespaces of teams on a shared cluster: with a quota, and with an operator of their own."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from harness import installation, writes
from harness.asking import ANSWER, ask
from harness.client import ClientPod
from harness.hub import Hub
from harness.models import cpu_model
from harness.namespace import Namespace
from harness.traffic import traffic

LIMITS = {"requests.cpu": "2", "requests.memory": "4Gi", "limits.cpu": "8", "limits.memory": "12Gi", "pods": "4"}
TEAM = "example.com/team"
DEFAULTS = {
    "type": "Container",
    "default": {"cpu": "2", "memory": "2Gi"},
    "defaultRequest": {"cpu": "50m", "memory": "64Mi"},
    "max": {"cpu": "2", "memory": "2Gi"},
}


def quota(hard: dict[str, str]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "team"}, "spec": {"hard": hard}}


def limit_range() -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "team"}, "spec": {"limits": [DEFAULTS]}}


def test_a_model_starts_within_a_quota_and_serves_while_others_exceed_it(
    namespace: Namespace, client: ClientPod, hub: Hub, measurement: Callable[[str], None]
) -> None:
    # The quota counts pods that were created before it: the client's, too.
    namespace.apply(quota(LIMITS), limit_range())
    namespace.apply(hub.model(namespace, "demo"))
    namespace.wait_for_condition("demo", "Ready")
    pods = {pod["metadata"]["uid"] for pod in namespace.pods("demo", "engine")}
    with traffic(client.service_url("demo")) as sent:
        namespace.kubectl("scale", "inferencemodel/demo", "--replicas=3")
        found = namespace.wait_for_condition("demo", "Scheduled", "False", reason="QuotaExceeded")
        assert "team" in found["message"] and "ResourceQuota" in found["message"], found
        namespace.kubectl("scale", "inferencemodel/demo", "--replicas=1")
        namespace.wait_for_condition("demo", "Ready")
        _another_model_names_the_fields_that_the_quota_requires(namespace)
    assert {pod["metadata"]["uid"] for pod in namespace.pods("demo", "engine")} == pods
    measurement(f"a namespace with a quota: {sent.summary()}")
    sent.check()


def _another_model_names_the_fields_that_the_quota_requires(namespace: Namespace) -> None:
    """Without defaults of the namespace its pods are refused; with the named fields they are created."""
    namespace.kubectl("delete", "limitrange", "team")
    namespace.apply(quota({**LIMITS, "pods": "8"}), cpu_model("other"))
    fields = {f"spec.{part}.resources.limits.{each}" for part in ("engine", "frontend") for each in ("cpu", "memory")}

    def all_named() -> bool:
        found = namespace.condition("other", "Scheduled")
        return found.get("reason") == "FieldsRequired" and all(field in found["message"] for field in fields)

    namespace.wait("the names of all fields", all_named)
    resources = {"requests": {"cpu": "50m", "memory": "300Mi"}, "limits": {"cpu": "1", "memory": "2Gi"}}
    both = {part: {"resources": resources} for part in ("engine", "frontend")}
    namespace.patch("inferencemodel", "other", {"spec": both})
    namespace.wait("its pods", lambda: all(namespace.pods("other", part) for part in ("engine", "frontend")))


@dataclass(frozen=True)
class Team:
    """Namespace with a release that manages it alone."""

    namespace: Namespace
    release: str

    def install(self, images: dict[str, str]) -> None:
        values = {
            "crds.enabled": False,
            "watchNamespaces": [self.namespace.name],
            # As on OpenShift: the images' own user, as no admission chooses one here.
            "defaults.podIdentity": "Namespace",
            "defaults.engine.labels": {TEAM: self.release},
        }
        installation.install(images, values, release=self.release, namespace=self.namespace.name)

    def uninstall(self) -> None:
        installation.helm("uninstall", self.release, "--wait", "--timeout=600s", namespace=self.namespace.name)


@pytest.fixture
def team(images: dict[str, str], namespace: Namespace) -> Iterator[Team]:
    """Namespace of a team, while the first release is limited to the test's own namespace."""
    name = f"team-{secrets.token_hex(2)}"
    team = Team(Namespace.create(name), name)
    team.namespace.mount_directory("models", installation.MODELS)
    installation.install(images, {"watchNamespaces": [namespace.name]})
    yield team
    installation.install(images)
    team.namespace.delete(wait=False)


def test_two_releases_manage_their_own_namespaces(
    namespace: Namespace,
    client: ClientPod,
    team: Team,
    images: dict[str, str],
    measurement: Callable[[str], None],
) -> None:
    namespace.apply(cpu_model("demo"))
    namespace.wait_for_condition("demo", "Ready")
    began = writes.position()
    with traffic(client.service_url("demo")) as sent:
        team.namespace.apply(cpu_model("demo"))
        team.install(images)
        team.namespace.wait_for_condition("demo", "Ready")
        (engine,) = team.namespace.pods("demo", "engine")
        assert engine["metadata"]["labels"][TEAM] == team.release
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & set(engine["spec"]["securityContext"])
        theirs = ClientPod.create(team.namespace, images["frontend"])
        assert ask(theirs.openai("demo"), "demo") == ANSWER
        own = set(writes.of_operators(began))
        other = set(writes.of_operators(began, team.namespace.name))
        team.uninstall()
        # Models continue to serve without an operator, and the definition of InferenceModel stays.
        assert ask(theirs.openai("demo"), "demo") == ANSWER
    # Reviews of the operator's own permissions have no namespace.
    assert {write.namespace for write in own} <= {"", installation.NAMESPACE, namespace.name}
    assert {write.namespace for write in other} <= {"", team.namespace.name}
    namespace.wait_for_condition("demo", "Ready")
    measurement(f"a second release: {sent.summary()}")
    sent.check()
