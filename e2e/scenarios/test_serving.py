"""From `apply` to a streamed answer, with one rank and with two pods."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

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


@pytest.mark.parametrize("spread", [False, True], ids=["one-node", "two-nodes"])
def test_two_pods_give_the_same_answers_as_one(namespace: Namespace, client: ClientPod, spread: bool) -> None:
    engines_of_two = {"app.kubernetes.io/instance": "two", "app.kubernetes.io/component": "engine"}
    term = {"labelSelector": {"matchLabels": engines_of_two}, "topologyKey": "kubernetes.io/hostname"}
    kind = "podAntiAffinity" if spread else "podAffinity"
    two = cpu_model("two", tensor=2)
    two["spec"]["engine"]["affinity"] = {kind: {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    namespace.apply(cpu_model("one"), two)
    namespace.wait("the first pod", lambda: namespace.objects("pods", MODEL_LABEL))
    kill_operator()
    for name in ("one", "two"):
        namespace.wait_for_condition(name, "Ready")
    nodes = {pod["spec"]["nodeName"] for pod in namespace.pods("two", "engine")}
    assert len(nodes) == (2 if spread else 1)
    assert namespace.status("two")["ranks"] == "2/2"
    questions = (QUESTION, "How do I run the tests?", "Write a poem about rain and iron.")
    one, both = client.openai("one"), client.openai("two")
    assert [ask(one, "one", q) for q in questions] == [ask(both, "two", q) for q in questions]
