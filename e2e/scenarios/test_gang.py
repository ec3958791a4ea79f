"""Replicas of several pods that compete for the last devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Final

import pytest

from harness import nodes
from harness.asking import ANSWER, ask
from harness.client import ClientPod
from harness.models import cpu_model
from harness.namespace import Namespace

GPU: Final = "e2e.minisgl.io/gpu"


@pytest.fixture(autouse=True)
def one_device_each(images: dict[str, str]) -> Iterator[None]:
    """One device on each of the two nodes: enough for one replica of two pods."""
    with ExitStack() as stack:
        for node in nodes.names():
            stack.enter_context(nodes.devices(node, GPU, 1))
        yield


def model_of_two_pods(name: str, replicas: int = 1) -> dict[str, Any]:
    model = cpu_model(name, tensor=2, replicas=replicas)
    requests = model["spec"]["engine"]["resources"]["requests"]
    model["spec"]["engine"]["resources"] = {"requests": {**requests, GPU: "1"}, "limits": {GPU: "1"}}
    return model


def test_one_of_two_replicas_becomes_complete(namespace: Namespace, client: ClientPod) -> None:
    namespace.apply(model_of_two_pods("demo", replicas=2))
    namespace.wait("a complete replica", lambda: namespace.status("demo").get("readyReplicas") == 1)
    assert ask(client.openai("demo"), "demo") == ANSWER
    # An autoscaler sees that another node is needed.
    namespace.wait("a pending pod", lambda: _pending(namespace, "demo"))


@pytest.mark.soak
def test_one_of_two_models_becomes_complete(namespace: Namespace, client: ClientPod) -> None:
    names = ("demo", "other")
    namespace.apply(*(model_of_two_pods(name) for name in names))

    def ready() -> str:
        return next((name for name in names if namespace.status(name).get("readyReplicas") == 1), "")

    first = namespace.wait("a complete replica of one model", ready)
    assert ask(client.openai(first), first) == ANSWER
    (second,) = set(names) - {first}
    namespace.kubectl("delete", "inferencemodel", first)
    namespace.wait_for_condition(second, "Ready")
    assert ask(client.openai(second), second) == ANSWER


def _pending(namespace: Namespace, model: str) -> list[dict[str, Any]]:
    return [pod for pod in namespace.pods(model, "engine") if not pod["spec"].get("nodeName")]
