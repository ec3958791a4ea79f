"""Models from a fake Hub. The operator is killed during the fetch."""

from __future__ import annotations

from harness.asking import ANSWER, ask
from harness.client import ClientPod
from harness.hub import Hub
from harness.installation import kill_operator
from harness.namespace import Namespace


def test_a_hub_model_is_fetched_once_for_two_replicas(namespace: Namespace, client: ClientPod, hub: Hub) -> None:
    repository = hub.fake.repositories["org/demo"]
    repository.broken_downloads = 1
    model = hub.model(namespace, "demo", revision="v1")
    model["spec"]["replicas"] = 2
    namespace.apply(model)
    namespace.wait("the fetch pod", lambda: namespace.pods("demo", "fetch"))
    kill_operator()
    namespace.wait("two replicas", lambda: namespace.status("demo").get("readyReplicas") == 2)
    assert ask(client.openai("demo"), "demo") == ANSWER
    # One interrupted download, and one that resumed it.
    assert hub.fake.downloads("org/demo") == 2
    assert namespace.status("demo")["model"]["commit"] == repository.commit


def test_a_token_gives_access_to_a_gated_repository(namespace: Namespace, client: ClientPod, hub: Hub) -> None:
    hub.add("org/gated", token="secret")
    namespace.kubectl("create", "secret", "generic", "hub", "--from-literal=token=secret")
    namespace.apply(hub.model(namespace, "demo", "org/gated", tokenSecretRef={"name": "hub"}))
    namespace.wait("the fetch pod", lambda: namespace.pods("demo", "fetch"))
    kill_operator()
    namespace.wait_for_condition("demo", "Ready")
    assert ask(client.openai("demo"), "demo") == ANSWER
