"""Claims of one node, and revisions that follow each other on a claim."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from cluster.places import nodes, run
from fake_hub import Repository
from harness import installation
from harness.asking import ANSWER, ask
from harness.client import ClientPod
from harness.disk import small_disk
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


@pytest.mark.soak
def test_a_claim_that_is_too_small_loses_obsolete_revisions_and_then_reports_what_is_missing(
    namespace: Namespace, client: ClientPod, hub: Hub, tmp_path: Path
) -> None:
    """Two revisions fit on the disk of the claim, which is on one node."""
    (node, *_), directory = nodes(), installation.MODELS.parent / f"small-{namespace.name}"
    for number in range(1, 4):
        hub.fake.repositories[f"org/number{number}"] = Repository(_another_checkpoint(tmp_path / str(number), number))
    large = _another_checkpoint(tmp_path / "large", 4)
    (large / WEIGHTS).write_bytes(bytes(3 << 20))
    hub.fake.repositories["org/large"] = Repository(large)
    model = hub.model(namespace, "demo", "org/number1")
    model["spec"]["model"]["cache"] = {"size": "1Gi", "accessMode": "ReadWriteOnce"}
    model["spec"]["engine"]["nodeSelector"] = {"kubernetes.io/hostname": node}
    source = model["spec"]["model"]["source"]["huggingFace"]

    def checkpoints() -> set[str]:
        """Repositories of the complete checkpoints on the claim."""
        records = run(node, "sh", "-c", f"cat {directory}/*/minisgl-fetch.json").stdout
        return set(re.findall(r'"repository":"([^"]+)"', records))

    def serve(repo: str) -> None:
        source["repo"] = repo
        namespace.apply(model)

        def served() -> bool:
            status = namespace.status("demo")
            updated = status.get("model", {}).get("name") == f"{repo}@main" and status["updatedReplicas"] == 1
            return bool(updated and status["readyReplicas"] == 1)

        namespace.wait(f"{repo} in service", served)
        # An additional replica may serve it first, while the others still read the revision before.
        namespace.wait_for_condition("demo", "Progressing", "False", reason="UpToDate")

    with small_disk(directory, "4m"):
        namespace.provide_volume("demo-cache", directory, "ReadWriteOnce")
        serve("org/number1")
        serve("org/number2")
        assert checkpoints() == {"org/number1", "org/number2"}
        serve("org/number3")
        assert checkpoints() == {"org/number2", "org/number3"}
        source["repo"] = "org/large"
        namespace.apply(model)
        message = namespace.wait_for_condition("demo", "ModelCached", "False", reason="NoSpace")["message"]
        assert "The download needs 3.0 MiB" in message
        assert "Raise spec.model.cache.size to 2Gi or more" in message
        assert checkpoints() == {"org/number2", "org/number3"}
        assert not hub.fake.downloads("org/large")
        assert ask(client.openai("demo"), "demo") == ANSWER
        namespace.delete()


def _another_checkpoint(directory: Path, number: int) -> Path:
    """The demo checkpoint with one weight changed by nothing that matters, so that its file has another hash."""
    shutil.copytree(installation.ROOT / ".cache/demo", directory)
    with (directory / WEIGHTS).open("r+b") as weights:
        # The lowest bits of the mantissa of the last weight, float32 in little-endian order.
        weights.seek(-4, os.SEEK_END)
        weights.write(bytes([number]))
    return directory
