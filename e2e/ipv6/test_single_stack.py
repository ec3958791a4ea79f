"""A cluster with IPv6 only: the endpoint, and a replica of two pods that loses a rank and is rolled out."""

from __future__ import annotations

from ipaddress import IPv6Address

from openai import APIError, OpenAI

from cluster import layout
from harness.asking import ANSWER, ask
from harness.client import ClientPod
from harness.models import cpu_model
from harness.namespace import Namespace
from harness.ranks import kill_rank, launcher_status, launcher_url


def test_a_model_serves_through_its_service(namespace: Namespace, client: ClientPod) -> None:
    assert layout.IPV6, "set MINISGL_IP_FAMILY=6"
    namespace.apply(cpu_model("demo"))
    namespace.wait_for_condition("demo", "Ready")
    assert ask(client.openai("demo"), "demo") == ANSWER
    service = namespace.get("services", "demo")
    assert service is not None
    assert IPv6Address(service["spec"]["clusterIP"])
    for component in ("frontend", "engine"):
        (pod,) = namespace.pods("demo", component)
        # No IPv4 address beside it.
        (address,) = pod["status"]["podIPs"]
        assert IPv6Address(address["ip"])


def test_two_pods_on_two_nodes_survive_a_killed_rank_and_a_rollout(namespace: Namespace, client: ClientPod) -> None:
    model = cpu_model("demo", tensor=2, recovery={}, rollout={"strategy": "Recreate"})
    engines = {"app.kubernetes.io/instance": "demo", "app.kubernetes.io/component": "engine"}
    term = {"labelSelector": {"matchLabels": engines}, "topologyKey": "kubernetes.io/hostname"}
    apart = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    model["spec"]["engine"]["affinity"] = apart
    namespace.apply(model)
    namespace.wait_for_condition("demo", "Ready")
    openai = client.openai("demo")
    assert ask(openai, "demo") == ANSWER
    launcher = launcher_url(namespace, "demo-r0-0")
    status = launcher_status(launcher)
    assert (status["transport"], status["ready_ranks"]) == ("gloo", 2)
    before = {pod["metadata"]["uid"] for pod in namespace.pods("demo", "engine")}

    restarts = launcher_status(launcher)["restarts"]
    kill_rank(namespace, "demo-r0-1", 1)
    namespace.wait("the restart", lambda: launcher_status(launcher)["restarts"] > restarts)
    namespace.wait("the right answer", lambda: _answer(openai) == ANSWER)
    assert {pod["metadata"]["uid"] for pod in namespace.pods("demo", "engine")} == before

    environment = [*model["spec"]["engine"]["env"], {"name": "REVISION", "value": "2"}]
    namespace.patch("inferencemodel", "demo", {"spec": {"engine": {"env": environment}}})
    namespace.wait("new pods", lambda: _replaced(namespace, before))
    namespace.wait_for_condition("demo", "Ready")
    namespace.wait("the right answer", lambda: _answer(openai) == ANSWER)


def _answer(openai: OpenAI) -> str:
    """Answer of the model; "" if the request fails."""
    try:
        return ask(openai, "demo")
    except APIError:
        return ""


def _replaced(namespace: Namespace, before: set[str]) -> bool:
    pods = namespace.pods("demo", "engine")
    return len(pods) == 2 and before.isdisjoint(pod["metadata"]["uid"] for pod in pods)
