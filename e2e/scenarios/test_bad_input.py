"""Invalid input that the API server accepts: a condition reports what is wrong and what to do.

A healthy model in another namespace must not be affected.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from openai import AuthenticationError

from cluster.control_plane import kubectl
from cluster.places import nodes, run
from harness import installation
from harness.asking import ANSWER, ask
from harness.client import ClientPod
from harness.disk import small_disk
from harness.hub import Hub
from harness.models import cpu_model
from harness.namespace import Namespace

OPERATOR_ROLE = "minisgl-operator"


@pytest.fixture(scope="module")
def bystander(images: dict[str, str]) -> Iterator[ClientPod]:
    """Client of a model that serves in another namespace."""
    namespace = Namespace.create("bystander")
    installation.publish_checkpoint("demo", installation.ROOT / ".cache/demo")
    namespace.mount_directory("models", installation.MODELS)
    namespace.apply(cpu_model("healthy"))
    namespace.wait_for_condition("healthy", "Ready")
    yield ClientPod.create(namespace, images["frontend"])
    namespace.delete()


@pytest.fixture(autouse=True)
def other_models_are_not_affected(bystander: ClientPod) -> Iterator[None]:
    pods = {p["metadata"]["uid"] for p in bystander.namespace.objects("pods")}
    yield
    bystander.namespace.wait_for_condition("healthy", "Ready")
    assert ask(bystander.openai("healthy"), "healthy") == ANSWER
    assert {p["metadata"]["uid"] for p in bystander.namespace.objects("pods")} == pods


def wait_for_failure(namespace: Namespace, kind: str, reason: str, *words: str) -> None:
    """Wait until a condition of the model "bad" is False with this reason; its message must contain these words, and
    exactly one Event must report it."""
    condition = namespace.wait_for_condition("bad", kind, "False", reason=reason)
    for word in words:
        assert word in condition["message"], condition["message"]
    namespace.wait("an Event with the reason", lambda: reason in event_reasons(namespace))
    assert event_reasons(namespace).count(reason) == 1


def assert_no_container_restarted(namespace: Namespace) -> None:
    statuses = [s for p in namespace.objects("pods") for s in p["status"].get("containerStatuses", [])]
    assert all(s["restartCount"] == 0 for s in statuses), json.dumps(statuses)


def test_a_tensor_parallel_size_that_does_not_divide_the_heads(namespace: Namespace) -> None:
    namespace.apply(cpu_model("bad", tensor=3))
    wait_for_failure(
        namespace, "Accepted", "TensorDoesNotDivideHeads", "4 attention heads", "Set spec.parallelism.tensor"
    )
    assert_no_container_restarted(namespace)


def test_an_image_that_does_not_exist(namespace: Namespace) -> None:
    model = cpu_model("bad")
    model["spec"]["engine"] |= {"image": "localhost/not-there:1", "imagePullPolicy": "IfNotPresent"}
    namespace.apply(model)
    wait_for_failure(namespace, "Scheduled", "ImagePullFailed", "localhost/not-there:1", "spec.engine.image")


def test_a_missing_secret(namespace: Namespace, client: ClientPod) -> None:
    model = cpu_model("bad")
    model["spec"]["frontend"]["auth"] = {"apiKeysSecretRef": {"name": "keys-not-there"}}
    namespace.apply(model)
    wait_for_failure(namespace, "Accepted", "SecretNotFound", "keys-not-there", "create it")
    assert_no_container_restarted(namespace)
    namespace.kubectl("create", "secret", "generic", "keys-not-there", "--from-literal=keys=key-1")
    namespace.wait_for_condition("bad", "Ready")
    with pytest.raises(AuthenticationError):
        ask(client.openai("bad", "key-2"), "bad")
    assert ask(client.openai("bad", "key-1"), "bad") == ANSWER


def test_a_missing_claim(namespace: Namespace) -> None:
    model = cpu_model("bad")
    model["spec"]["model"]["source"]["pvc"] = {"claimName": "claim-not-there"}
    namespace.apply(model)
    wait_for_failure(namespace, "Accepted", "ClaimNotFound", "claim-not-there", "create it")


def test_too_few_gpus(namespace: Namespace) -> None:
    model = cpu_model("bad")
    model["spec"]["engine"]["device"] = "auto"
    namespace.apply(model)
    wait_for_failure(namespace, "Scheduled", "InsufficientGPU", "nvidia.com/gpu", "Free GPUs")


def test_a_directory_without_a_checkpoint(namespace: Namespace) -> None:
    model = cpu_model("bad")
    model["spec"]["model"]["source"]["pvc"]["path"] = "nothing-here"
    namespace.apply(model)
    wait_for_failure(namespace, "Accepted", "InvalidModel")
    assert_no_container_restarted(namespace)


def test_a_truncated_checkpoint(namespace: Namespace) -> None:
    broken = installation.MODELS / "broken"
    shutil.rmtree(broken, ignore_errors=True)
    shutil.copytree(installation.MODELS / "demo", broken)
    with (broken / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    model = cpu_model("bad")
    model["spec"]["model"]["source"]["pvc"]["path"] = "broken"
    namespace.apply(model)
    wait_for_failure(namespace, "Accepted", "InvalidModel")
    assert_no_container_restarted(namespace)


@pytest.mark.parametrize(
    ("repository", "reason", "next_step"),
    [
        ("org/gated", "AuthRequired", "tokenSecretRef"),
        # Without a token, the Hub does not reveal whether a repository is private or does not exist.
        ("org/none", "AuthRequired", "Check its name"),
        ("org/demo", "NotFound", "huggingFace"),
        ("org/limited", "RateLimited", "continues automatically"),
    ],
    ids=["gated", "missing", "no-such-revision", "limited"],
)
def test_errors_of_the_hub(namespace: Namespace, hub: Hub, repository: str, reason: str, next_step: str) -> None:
    hub.add("org/gated", token="secret")
    hub.add("org/limited", too_many_requests=100_000)
    revision = {"revision": "v2"} if reason == "NotFound" else {}
    namespace.apply(hub.model(namespace, "bad", repository, **revision))
    installation.kill_operator()
    wait_for_failure(namespace, "ModelCached", reason, repository, next_step)
    assert not namespace.pods("bad", "engine")


def test_a_full_disk(namespace: Namespace, hub: Hub) -> None:
    directory = installation.MODELS.parent / "small"
    with small_disk(directory, "1m"):
        namespace.apply(hub.model_in(namespace, "bad", directory))
        wait_for_failure(namespace, "ModelCached", "NoSpace", "org/demo", "needs", "free", "cache.size")
        assert not namespace.pods("bad", "engine")
        for node in nodes():
            run(node, "mount", "-o", "remount,size=64m", directory)
        namespace.wait_for_condition("bad", "ModelCached", reason="Cached")
        namespace.delete()


def test_a_missing_permission_of_the_operator(namespace: Namespace) -> None:
    with without_permission("statefulsets", "create"):
        namespace.apply(cpu_model("bad"))
        wait_for_failure(namespace, "Accepted", "Forbidden", "statefulsets", "create")
        namespace.wait("the other children", lambda: namespace.get("deployments", "bad-frontend"))
    namespace.wait_for_condition("bad", "Ready")


def event_reasons(namespace: Namespace) -> list[str]:
    """Reasons of the Events about models."""
    found = namespace.objects("events")
    return [event["reason"] for event in found if event["regarding"]["kind"] == "InferenceModel"]


@contextmanager
def without_permission(resource: str, verb: str) -> Iterator[None]:
    """Remove a verb on one resource from the operator's role."""
    role = json.loads(kubectl("get", "clusterrole", OPERATOR_ROLE, "-o", "json"))
    fewer = [
        {**rule, "verbs": [each for each in rule["verbs"] if each != verb]} if resource in rule["resources"] else rule
        for rule in role["rules"]
    ]
    assert fewer != role["rules"]
    apply_role({**role, "rules": fewer})
    try:
        yield
    finally:
        apply_role(role)


def apply_role(role: dict[str, Any]) -> None:
    """Apply a role as helm: another owner of its fields would block upgrades of the release."""
    metadata = {name: role["metadata"][name] for name in ("name", "labels", "annotations")}
    options = ("--server-side", "--force-conflicts", "--field-manager=helm")
    kubectl("apply", *options, "-f", "-", stdin=json.dumps({**role, "metadata": metadata}))


def test_an_engine_out_of_memory(namespace: Namespace) -> None:
    model = cpu_model("bad")
    model["spec"]["engine"]["resources"] = {"requests": {"memory": "64Mi"}, "limits": {"memory": "160Mi"}}
    namespace.apply(model)
    wait_for_failure(namespace, "EngineReady", "OutOfMemory", "spec.engine.resources.limits.memory")


def test_a_namespace_with_a_model_can_be_deleted(namespace: Namespace) -> None:
    namespace.apply(cpu_model("bad"))
    namespace.wait("its pods", lambda: namespace.pods("bad", "engine"))
    namespace.delete()
    assert namespace.kubectl("get", "namespace", namespace.name, "--ignore-not-found").strip() == ""


def test_a_deleted_child_is_created_again_and_an_edited_one_corrected(namespace: Namespace) -> None:
    # Without a number in the spec, the editor would own it.
    namespace.apply(cpu_model("bad", frontend={"replicas": 1}))
    namespace.wait("its Service", lambda: namespace.get("services", "bad"))
    before = uid(namespace.get("services", "bad"))
    namespace.kubectl("delete", "service", "bad")
    namespace.wait("another Service", lambda: uid(namespace.get("services", "bad")) not in ("", before))
    namespace.patch("deployment", "bad-frontend", {"spec": {"replicas": 3}})

    def repaired() -> bool:
        deployment = namespace.get("deployments", "bad-frontend")
        return deployment is not None and deployment["spec"]["replicas"] == 1

    namespace.wait("the Deployment with one replica again", repaired)


def test_a_name_conflict_with_another_owner(namespace: Namespace) -> None:
    namespace.kubectl("create", "service", "clusterip", "bad", "--tcp=80")
    before = uid(namespace.get("services", "bad"))
    namespace.apply(cpu_model("bad"))
    wait_for_failure(namespace, "Accepted", "Conflict", "bad")
    assert uid(namespace.get("services", "bad")) == before
    namespace.kubectl("delete", "service", "bad")
    namespace.wait_for_condition("bad", "Ready")


def uid(found: dict[str, Any] | None) -> str:
    return str(found["metadata"]["uid"]) if found else ""
