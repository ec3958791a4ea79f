"""What users install and apply as it is: the chart's own test, and the samples."""

from __future__ import annotations

import os
import socket
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import tools
from cluster.relay import host_kubeconfig
from harness import installation
from harness.asking import ANSWER, ask
from harness.client import ClientPod
from harness.models import cpu_model
from harness.namespace import Namespace

SAMPLES = installation.ROOT / "manifests/samples"
# What becomes of each on nodes without GPUs and without storage classes.
BECOMES = {
    "model.yaml": ("qwen3", "Scheduled", "NoStorageClass"),
    "hub-private.yaml": ("llama", "Scheduled", "NoStorageClass"),
    "pvc-replicas.yaml": ("qwen3-32b", "Scheduled", "InsufficientGPU"),
    "cpu-two-pods.yaml": ("demo", "Ready", "Ready"),
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def with_test(images: dict[str, str]) -> Iterator[Namespace]:
    """The release's namespace with a model that the chart's test asks."""
    namespace = Namespace(installation.NAMESPACE)
    installation.publish_checkpoint("demo", installation.ROOT / ".cache/demo")
    namespace.mount_directory("models", installation.MODELS)
    namespace.apply(cpu_model("asked"))
    installation.install(images, {"test.model": "asked"})
    yield namespace
    installation.install(images)
    namespace.kubectl("delete", "inferencemodel/asked", "persistentvolumeclaim/models", "--wait=true")
    namespace.kubectl("delete", "persistentvolume", "-l", f"e2e={namespace.name}")


def test_helm_test_asks_a_model(with_test: Namespace) -> None:
    with_test.wait_for_condition("asked", "Ready")
    said = installation.helm("test", installation.RELEASE, "--timeout=600s")
    assert "Phase:          Succeeded" in said, said


def test_the_notes_commands_get_an_answer(with_test: Namespace) -> None:
    """As users paste them, with the name of a model that is there and a port that is free."""
    with_test.wait_for_condition("asked", "Ready")
    notes = textwrap.dedent(installation.helm("get", "notes", installation.RELEASE)).replace("qwen3", "asked")
    lines = notes.splitlines()
    forward = next(line.strip() for line in lines if " port-forward " in line)
    first = next(number for number, line in enumerate(lines) if line.strip().startswith("curl "))
    ask_it = "\n".join(lines[first : lines.index("", first)])
    port = free_port()
    script = f"{forward}\nuntil curl -s http://127.0.0.1:8000/health; do sleep 0.2; done\n{ask_it}\nkill %1"
    script = script.replace("8000:80", f"{port}:80").replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    environment = {
        **os.environ,
        "PATH": f"{Path(tools.program('kubectl')).parent}:{os.environ['PATH']}",
        "KUBECONFIG": host_kubeconfig(),
    }
    done = subprocess.run(
        ["bash", "-m", "-c", script], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert '"role":"assistant"' in done.stdout, done.stdout + done.stderr


def test_every_sample_becomes_what_it_can_here(namespace: Namespace, client: ClientPod) -> None:
    assert {sample.name for sample in SAMPLES.iterdir()} == set(BECOMES)
    namespace.kubectl("create", "secret", "generic", "hub", "--from-literal=token=hf_x")
    namespace.kubectl("create", "secret", "generic", "api-keys", "--from-literal=keys=sk-one-of-ours")
    namespace.kubectl("apply", "-f", str(SAMPLES))
    for name, kind, reason in BECOMES.values():
        status = "True" if kind == "Ready" else "False"
        namespace.wait_for_condition(name, kind, status, reason=reason)
        assert namespace.condition(name, "Accepted")["status"] == "True"
    assert ask(client.openai("demo"), "demo") == ANSWER
