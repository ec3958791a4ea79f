"""From `apply` to a streamed answer, with one rank and with two pods."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from cluster.tools import say
from harness.asking import ANSWER, QUESTION, ask, pieces
from harness.client import ClientPod
from harness.installation import kill_operator
from harness.models import cpu_model
from harness.namespace import Namespace

MODEL_LABEL = "app.kubernetes.io/instance"
"""Label that only pods of a model have."""


def test_apply_creates_an_endpoint(namespace: Namespace, client: ClientPod, measurement: Callable[[str], None]) -> None:
    began = time.monotonic()
    namespace.apply(cpu_model("demo"))
    namespace.wait("its first pod", lambda: namespace.objects("pods", MODEL_LABEL))
    kill_operator()
    namespace.wait_for_condition("demo", "Ready")
    measurement(f"apply to Ready: {time.monotonic() - began:.1f} s, with the operator killed in between")
    openai = client.openai("demo")
    assert [model.id for model in openai.models.list()] == ["demo"]
    assert ask(openai, "demo") == ANSWER
    # A frontend on a busy machine sends several tokens in one event.
    assert any(len(pieces(openai, "demo")) > 1 for _ in range(10))
    say(namespace.kubectl("get", "imodel", "-o", "wide"))


def test_two_pods_on_one_node_and_on_two_give_the_same_answers_as_one(namespace: Namespace, client: ClientPod) -> None:
    namespace.apply(cpu_model("one"), _two_pods("near", "podAffinity"), _two_pods("far", "podAntiAffinity"))
    namespace.wait("the first pod", lambda: namespace.objects("pods", MODEL_LABEL))
    kill_operator()
    for name in ("one", "near", "far"):
        namespace.wait_for_condition(name, "Ready")
    for name, count in (("near", 1), ("far", 2)):
        assert len({pod["spec"]["nodeName"] for pod in namespace.pods(name, "engine")}) == count
        assert namespace.status(name)["ranks"] == "2/2"
    questions = (QUESTION, "How do I run the tests?", "Write a poem about rain and iron.")
    one, near, far = ([ask(client.openai(name), name, q) for q in questions] for name in ("one", "near", "far"))
    assert one == near == far


def _two_pods(name: str, kind: str) -> dict[str, Any]:
    """Model with two pods, which an affinity of this kind brings together or keeps apart."""
    labels = {"app.kubernetes.io/instance": name, "app.kubernetes.io/component": "engine"}
    term = {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
    model = cpu_model(name, tensor=2)
    model["spec"]["engine"]["affinity"] = {kind: {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    return model
