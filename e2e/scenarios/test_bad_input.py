"""What a user can get wrong: a refusal at `apply`, or a condition that says what is wrong and what to do.

One healthy model stands beside all of it, and goes on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from harness import installation
from harness.asking import ANSWER, ask
from harness.client import ClientPod
from harness.models import cpu_model
from harness.namespace import Namespace

SECONDS = 150


@pytest.fixture(scope="module")
def bystander(images: dict[str, str]) -> Iterator[ClientPod]:
    """A model that serves, in a namespace of its own, with a client beside it."""
    namespace = Namespace.create("bystander")
    installation.publish_checkpoint("demo", installation.ROOT / ".cache/demo")
    namespace.mount_directory("models", installation.MODELS)
    namespace.apply(cpu_model("healthy"))
    namespace.wait_for_condition("healthy", "Ready", seconds=300)
    yield ClientPod.create(namespace, images["frontend"])
    namespace.delete()


@pytest.fixture(autouse=True)
def others_go_on(bystander: ClientPod) -> Iterator[None]:
    pods = {p["metadata"]["uid"] for p in bystander.namespace.objects("pods")}
    yield
    assert bystander.namespace.condition("healthy", "Ready")["status"] == "True"
    assert ask(bystander.openai("healthy"), "healthy") == ANSWER
    assert {p["metadata"]["uid"] for p in bystander.namespace.objects("pods")} == pods


def said(namespace: Namespace, kind: str, reason: str, *words: str, status: str = "False") -> dict[str, str]:
    """Wait until a condition of the model "bad" has this reason; its message has to have these words."""
    condition = namespace.wait_for_condition("bad", kind, status, SECONDS, reason)
    for word in words:
        assert word in condition["message"], condition["message"]
    return condition


def no_container_of_ours_crashed(namespace: Namespace) -> None:
    statuses = [s for p in namespace.objects("pods") for s in p["status"].get("containerStatuses", [])]
    assert all(s["restartCount"] == 0 for s in statuses), json.dumps(statuses)


def test_two_sources(namespace: Namespace) -> None:
    model = cpu_model("bad")
    model["spec"]["model"]["source"]["huggingFace"] = {"repo": "org/demo"}
    refusal = namespace.refusal(model)
    assert "spec.model.source" in refusal
    assert "exactly one" in refusal


def test_a_name_too_long(namespace: Namespace) -> None:
    assert "40" in namespace.refusal(cpu_model("a" * 41))


def test_an_immutable_field(namespace: Namespace) -> None:
    model = cpu_model("bad")
    model["spec"] |= {"suspend": True, "model": {"source": {"huggingFace": {"repo": "a/b"}}, "cache": {"size": "1Gi"}}}
    namespace.apply(model)
    model["spec"]["model"]["cache"]["size"] = "2Gi"
    refusal = namespace.refusal(model)
    assert "size" in refusal
    assert "immutable" in refusal or "cannot" in refusal


def test_tensor_that_does_not_divide_the_heads(namespace: Namespace) -> None:
    namespace.apply(cpu_model("bad", tensor=3))
    said(namespace, "Accepted", "TensorDoesNotDivideHeads", "tensor")
    no_container_of_ours_crashed(namespace)


def test_an_image_that_does_not_exist(namespace: Namespace) -> None:
    model = cpu_model("bad")
    model["spec"]["engine"] |= {"image": "localhost/not-there:1", "imagePullPolicy": "IfNotPresent"}
    namespace.apply(model)
    said(namespace, "Scheduled", "ImagePullFailed", "localhost/not-there:1")


def test_a_missing_secret(namespace: Namespace) -> None:
    model = cpu_model("bad")
    model["spec"]["frontend"]["auth"] = {"apiKeysSecretRef": {"name": "keys-not-there"}}
    namespace.apply(model)
    said(namespace, "Accepted", "SecretNotFound", "keys-not-there")
    namespace.kubectl("create", "secret", "generic", "keys-not-there", "--from-literal=keys=key-1")
    namespace.wait_for_condition("bad", "Ready", seconds=300)


def test_a_missing_claim(namespace: Namespace) -> None:
    model = cpu_model("bad")
    model["spec"]["model"]["source"]["pvc"] = {"claimName": "claim-not-there"}
    namespace.apply(model)
    said(namespace, "Accepted", "ClaimNotFound", "claim-not-there")


def test_more_gpus_than_there_are(namespace: Namespace) -> None:
    model = cpu_model("bad")
    model["spec"]["engine"]["device"] = "auto"
    namespace.apply(model)
    said(namespace, "Scheduled", "InsufficientGPU", "nvidia.com/gpu")


def test_a_directory_that_is_no_model(namespace: Namespace) -> None:
    model = cpu_model("bad")
    model["spec"]["model"]["source"]["pvc"]["path"] = "nothing-here"
    namespace.apply(model)
    said(namespace, "Accepted", "InvalidModel")
    no_container_of_ours_crashed(namespace)


def test_a_checkpoint_that_is_cut_off(namespace: Namespace) -> None:
    broken = installation.MODELS / "broken"
    shutil.rmtree(broken, ignore_errors=True)
    shutil.copytree(installation.MODELS / "demo", broken)
    with (broken / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    model = cpu_model("bad")
    model["spec"]["model"]["source"]["pvc"]["path"] = "broken"
    namespace.apply(model)
    said(namespace, "Accepted", "InvalidModel")
    no_container_of_ours_crashed(namespace)


def test_an_engine_out_of_memory(namespace: Namespace) -> None:
    model = cpu_model("bad")
    model["spec"]["engine"]["resources"] = {"requests": {"memory": "64Mi"}, "limits": {"memory": "160Mi"}}
    namespace.apply(model)
    namespace.wait_for_condition("bad", "EngineReady", "False", 180, "OutOfMemory")


def test_a_namespace_on_its_way_out(namespace: Namespace) -> None:
    namespace.apply(cpu_model("bad"))
    namespace.wait("its pods", lambda: namespace.pods("bad", "engine"), SECONDS)
    namespace.delete()
    assert namespace.kubectl("get", "namespace", namespace.name, "--ignore-not-found").strip() == ""


def test_a_child_deleted_and_a_child_edited(namespace: Namespace) -> None:
    namespace.apply(cpu_model("bad"))
    namespace.wait("its Service", lambda: namespace.get("service", "bad"), SECONDS)
    before = uid(namespace.get("service", "bad"))
    namespace.kubectl("delete", "service", "bad")
    namespace.wait("another Service", lambda: uid(namespace.get("service", "bad")) not in ("", before), SECONDS)
    namespace.patch("deployment", "bad-frontend", {"spec": {"replicas": 3}})

    def repaired() -> bool:
        deployment = namespace.get("deployment", "bad-frontend")
        return deployment is not None and deployment["spec"]["replicas"] == 1

    namespace.wait("the Deployment as the model says", repaired, SECONDS)


def test_a_name_that_someone_else_has(namespace: Namespace) -> None:
    namespace.kubectl("create", "service", "clusterip", "bad", "--tcp=80")
    before = uid(namespace.get("service", "bad"))
    namespace.apply(cpu_model("bad"))
    said(namespace, "Accepted", "Conflict", "bad")
    assert uid(namespace.get("service", "bad")) == before
    namespace.kubectl("delete", "service", "bad")
    namespace.wait_for_condition("bad", "Ready", seconds=300)


def uid(found: dict[str, Any] | None) -> str:
    return str(found["metadata"]["uid"]) if found else ""
