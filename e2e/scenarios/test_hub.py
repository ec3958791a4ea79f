"""A model from a fake Hub. The operator is killed during the fetch, and during the deletion."""

from __future__ import annotations

from harness.asking import ANSWER, ask
from harness.client import ClientPod
from harness.hub import Hub
from harness.installation import kill_operator
from harness.namespace import Namespace


def test_a_gated_model_is_fetched_once_for_two_replicas_and_all_its_objects_are_deleted_with_it(
    namespace: Namespace, client: ClientPod, hub: Hub
) -> None:
    repository = hub.add("org/gated", token="secret", revisions=("main", "v1"), broken_downloads=1)
    namespace.kubectl("create", "secret", "generic", "hub", "--from-literal=token=secret")
    model = hub.model(namespace, "demo", "org/gated", revision="v1", tokenSecretRef={"name": "hub"})
    model["spec"]["replicas"] = 2
    kinds = _kinds(namespace)
    before = _everything(namespace, kinds)
    namespace.apply(model)
    namespace.wait("the fetch pod", lambda: namespace.pods("demo", "fetch"))
    kill_operator()
    namespace.wait("two replicas", lambda: namespace.status("demo").get("readyReplicas") == 2)
    assert ask(client.openai("demo"), "demo") == ANSWER
    # One interrupted download, and one that resumed it.
    assert hub.fake.downloads("org/gated") == 2
    assert namespace.status("demo")["model"]["commit"] == repository.commit

    created = {kind for kind, _ in _everything(namespace, kinds) - before}
    assert created >= {"statefulset.apps", "deployment.apps", "job.batch", "service"}
    namespace.kubectl("delete", "inferencemodel", "demo", "--wait=false")
    kill_operator()
    namespace.wait("the end of its pods", lambda: not namespace.objects("pods", "app.kubernetes.io/instance=demo"))
    namespace.wait("the deletion of all objects", lambda: _everything(namespace, kinds) <= before)


def _kinds(namespace: Namespace) -> str:
    """All kinds of objects in namespaces, without events and metrics."""
    kinds = namespace.kubectl("api-resources", "--namespaced", "--verbs=list", "--output=name").split()
    return ",".join(kind for kind in kinds if not kind.startswith(("events", "pods.metrics")))


def _everything(namespace: Namespace, kinds: str) -> set[tuple[str, str]]:
    """Kind and name of all objects of these kinds in the namespace."""
    found = namespace.kubectl("get", kinds, "--output=name", "--ignore-not-found").split()
    return {(kind, name) for kind, _, name in (line.partition("/") for line in found)}
