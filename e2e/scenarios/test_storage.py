"""Claims of one node, and files that revisions share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import installation
from harness.asking import ANSWER, ask
from harness.client import ClientPod
from harness.hub import Hub
from harness.namespace import Namespace

WEIGHTS = "model.safetensors"


def single_node_model(namespace: Namespace, hub: Hub, repo: str) -> tuple[dict[str, Any], Path]:
    """Two replicas on a ReadWriteOnce claim, which prefer different nodes; and the directory behind the claim."""
    directory = installation.MODELS.parent / f"cache-{namespace.name}"
    directory.mkdir(exist_ok=True)
    directory.chmod(0o777)
    model = hub.model_in(namespace, "demo", directory, repo)
    model["spec"]["model"]["cache"]["accessMode"] = "ReadWriteOnce"
    engines = {"app.kubernetes.io/instance": "demo", "app.kubernetes.io/component": "engine"}
    term = {"labelSelector": {"matchLabels": engines}, "topologyKey": "kubernetes.io/hostname"}
    apart = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}
    model["spec"]["engine"]["affinity"] = {"podAntiAffinity": apart}
    model["spec"]["replicas"] = 2
    return model, directory


def test_a_claim_of_one_node_holds_fetches_and_replicas_together_and_revisions_share_files(
    namespace: Namespace, client: ClientPod, hub: Hub
) -> None:
    model, directory = single_node_model(namespace, hub, "org/demo")
    namespace.apply(model)
    namespace.wait_for_condition("demo", "Ready")
    namespace.wait("two replicas", lambda: namespace.status("demo").get("readyReplicas") == 2)
    (node,) = {pod["spec"]["nodeName"] for pod in namespace.pods("demo", "engine")}
    openai = client.openai("demo")
    assert ask(openai, "demo") == ANSWER

    first = {pod["metadata"]["uid"] for pod in namespace.pods("demo", "fetch")}
    hub.add("org/second")
    model["spec"]["model"]["source"]["huggingFace"]["repo"] = "org/second"
    namespace.apply(model)

    def node_of_fetch() -> str:
        fetches = (pod for pod in namespace.pods("demo", "fetch") if pod["metadata"]["uid"] not in first)
        return next((pod["spec"].get("nodeName", "") for pod in fetches), "")

    assert namespace.wait("the second fetch", node_of_fetch) == node

    def rolled_out() -> bool:
        status = namespace.status("demo")
        return bool(status["updatedReplicas"] == status["readyReplicas"] == 2 and len(_fetched(directory)) == 2)

    namespace.wait("the second revision", rolled_out)
    assert {pod["spec"]["nodeName"] for pod in namespace.pods("demo", "engine")} == {node}
    assert ask(openai, "demo") == ANSWER
    assert hub.fake.downloads("org/second") == 0
    assert len({(checkpoint / WEIGHTS).stat().st_ino for checkpoint in _fetched(directory)}) == 1


def _fetched(directory: Path) -> list[Path]:
    """Complete checkpoints on the claim."""
    return [path for path in directory.iterdir() if (path / "minisgl-fetch.json").exists()]
