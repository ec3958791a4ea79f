"""Invalid input that the API server accepts: a condition reports what is wrong and what to do.

A healthy model in another namespace must not be affected. What the API server alone decides, such as a taken name or a
missing permission of the operator, is in `tests/operator/cluster/`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest
from openai import AuthenticationError

from cluster.places import nodes, run
from harness import installation
from harness.asking import ANSWER, ask
from harness.client import ClientPod
from harness.disk import small_disk
from harness.hub import Hub
from harness.models import cpu_model
from harness.namespace import Namespace

# It would start for each of the models. Those that are fetched need it: the pod of a fetch runs where frontends may.
NO_FRONTEND: Final = {"nodeSelector": {"e2e/no-such-node": "true"}}


@contextmanager
def bystander(images: dict[str, str]) -> Iterator[None]:
    """A model that serves in another namespace, before, while and after the block runs."""
    namespace = Namespace.create("bystander")
    namespace.mount_directory("models", installation.MODELS)
    namespace.apply(cpu_model("healthy"))
    namespace.wait_for_condition("healthy", "Ready")
    client = ClientPod.create(namespace, images["frontend"])
    pods = {p["metadata"]["uid"] for p in namespace.objects("pods")}
    try:
        yield
        namespace.wait_for_condition("healthy", "Ready")
        assert ask(client.openai("healthy"), "healthy") == ANSWER
        assert {p["metadata"]["uid"] for p in namespace.objects("pods")} == pods
    finally:
        namespace.delete(wait=False)


def wait_for_failure(namespace: Namespace, model: str, kind: str, reason: str, *words: str) -> None:
    """Wait until a condition of the model is False with this reason; its message must contain these words, and exactly
    one Event must report it."""
    condition = namespace.wait_for_condition(model, kind, "False", reason=reason)
    for word in words:
        assert word in condition["message"], condition["message"]
    namespace.wait(f"the Event {reason} about {model}", lambda: reason in event_reasons(namespace, model))
    assert event_reasons(namespace, model).count(reason) == 1


def event_reasons(namespace: Namespace, model: str) -> list[str]:
    """Reasons of the Events about a model."""
    regarding = ("InferenceModel", model)
    found = namespace.objects("events")
    return [each["reason"] for each in found if (each["regarding"]["kind"], each["regarding"]["name"]) == regarding]


def assert_no_container_restarted(namespace: Namespace, model: str) -> None:
    pods = namespace.objects("pods", f"app.kubernetes.io/instance={model}")
    statuses = [s for p in pods for s in p["status"].get("containerStatuses", [])]
    assert all(s["restartCount"] == 0 for s in statuses), json.dumps(statuses)


@dataclass(frozen=True)
class Fault:
    """What is wrong with a model, and the condition that reports it with these words."""

    model: dict[str, Any]
    kind: str
    reason: str
    words: tuple[str, ...] = ()
    starts_no_engine: bool = False
    restarts_no_container: bool = False


def test_every_fault_is_reported_with_what_to_do(namespace: Namespace, hub: Hub, images: dict[str, str]) -> None:
    """A namespace with all of the models can be deleted."""
    disk = installation.MODELS.parent / "small"
    with ExitStack() as stack:
        stack.enter_context(bystander(images))
        stack.enter_context(small_disk(disk, "1m"))
        fetched = [*_faults_of_a_fetch(namespace, hub, disk)]
        # An operator that is killed between its writes of a status and of the Event loses the Event: no fault is there
        # before it is killed.
        with hub.fake.silent():
            namespace.apply(*(fault.model for fault in fetched))
            installation.kill_operator()
        _wait_for_failures(namespace, fetched)
        # After the others: two dozen pods that start at the same time leave the operator no CPU time.
        started = [*_faults_of_pods()]
        namespace.apply(*(fault.model for fault in started))
        _wait_for_failures(namespace, started)
        for node in nodes():
            run(node, "mount", "-o", "remount,size=64m", disk)
        namespace.wait_for_condition("disk", "ModelCached", reason="Cached")
        namespace.delete()
        assert namespace.kubectl("get", "namespace", namespace.name, "--ignore-not-found").strip() == ""


def _wait_for_failures(namespace: Namespace, faults: Sequence[Fault]) -> None:
    for fault in faults:
        name = fault.model["metadata"]["name"]
        wait_for_failure(namespace, name, fault.kind, fault.reason, *fault.words)
        assert not (fault.starts_no_engine and namespace.pods(name, "engine"))
        if fault.restarts_no_container:
            assert_no_container_restarted(namespace, name)


def _faults_of_pods() -> Iterator[Fault]:
    """Faults that the scheduler, a kubelet or the launcher of an engine finds. The first is of an engine that starts
    again and again, and then may report the same in other words."""
    model = cpu_model("memory", frontend=NO_FRONTEND, recovery={})
    model["spec"]["engine"]["resources"] = {"requests": {"memory": "64Mi"}, "limits": {"memory": "160Mi"}}
    yield Fault(model, "EngineReady", "OutOfMemory", ("spec.engine.resources.limits.memory",))
    model = cpu_model("heads", tensor=3, frontend=NO_FRONTEND)
    words = ("4 attention heads", "Set spec.parallelism.tensor")
    yield Fault(model, "Accepted", "TensorDoesNotDivideHeads", words, restarts_no_container=True)
    model = cpu_model("image")
    model["spec"]["engine"] |= {"image": "localhost/not-there:1", "imagePullPolicy": "IfNotPresent"}
    yield Fault(model, "Scheduled", "ImagePullFailed", ("localhost/not-there:1", "spec.engine.image"))
    model = cpu_model("claim")
    model["spec"]["model"]["source"]["pvc"] = {"claimName": "claim-not-there"}
    yield Fault(model, "Accepted", "ClaimNotFound", ("claim-not-there", "create it"))
    model = cpu_model("gpu")
    model["spec"]["engine"]["device"] = "auto"
    yield Fault(model, "Scheduled", "InsufficientGPU", ("nvidia.com/gpu", "Free GPUs"))
    model = cpu_model("nothing", frontend=NO_FRONTEND)
    model["spec"]["model"]["source"]["pvc"]["path"] = "nothing-here"
    yield Fault(model, "Accepted", "InvalidModel", restarts_no_container=True)
    broken = installation.MODELS / "broken"
    shutil.rmtree(broken, ignore_errors=True)
    shutil.copytree(installation.MODELS / "demo", broken)
    with (broken / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    model = cpu_model("truncated", frontend=NO_FRONTEND)
    model["spec"]["model"]["source"]["pvc"]["path"] = "broken"
    yield Fault(model, "Accepted", "InvalidModel", restarts_no_container=True)


def _faults_of_a_fetch(namespace: Namespace, hub: Hub, disk: Path) -> Iterator[Fault]:
    hub.add("org/gated", token="secret")
    hub.add("org/limited", too_many_requests=100_000)
    found = [
        Fault(hub.model(namespace, name, repo, **source), "ModelCached", reason, (repo, next_step))
        for name, repo, source, reason, next_step in (
            ("gated", "org/gated", {}, "AuthRequired", "tokenSecretRef"),
            # Without a token, the Hub does not reveal whether a repository is private or does not exist.
            ("missing", "org/none", {}, "AuthRequired", "Check its name"),
            ("revision", "org/demo", {"revision": "v2"}, "NotFound", "huggingFace"),
            ("limited", "org/limited", {}, "RateLimited", "continues automatically"),
        )
    ]
    words = ("org/demo", "needs", "free", "cache.size")
    found.append(Fault(hub.model_in(namespace, "disk", disk), "ModelCached", "NoSpace", words))
    yield from (replace(fault, starts_no_engine=True) for fault in found)


def test_a_missing_secret_is_reported_and_its_keys_are_required(namespace: Namespace, client: ClientPod) -> None:
    model = cpu_model("bad")
    model["spec"]["frontend"]["auth"] = {"apiKeysSecretRef": {"name": "keys-not-there"}}
    namespace.apply(model)
    wait_for_failure(namespace, "bad", "Accepted", "SecretNotFound", "keys-not-there", "create it")
    assert_no_container_restarted(namespace, "bad")
    namespace.kubectl("create", "secret", "generic", "keys-not-there", "--from-literal=keys=key-1")
    namespace.wait_for_condition("bad", "Ready")
    with pytest.raises(AuthenticationError):
        ask(client.openai("bad", "key-2"), "bad")
    assert ask(client.openai("bad", "key-1"), "bad") == ANSWER
