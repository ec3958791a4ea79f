"""Files that users install unchanged: the chart with its test, and the samples."""

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
# Expected condition of each sample on nodes without GPUs and storage classes: model, condition type, reason.
EXPECTED = {
    "model.yaml": ("qwen3", "Scheduled", "NoStorageClass"),
    "hub-private.yaml": ("llama", "Scheduled", "NoStorageClass"),
    "s3.yaml": ("qwen3-s3", "Scheduled", "NoStorageClass"),
    "pvc-replicas.yaml": ("qwen3-32b", "Scheduled", "InsufficientGPU"),
    "cpu-two-pods.yaml": ("demo", "Ready", "Ready"),
    "autoscaling.yaml": ("qwen3-8b", "Scheduled", "NoStorageClass"),
    "embedding.yaml": ("embedding", "Scheduled", "NoStorageClass"),
    "quantized.yaml": ("qwen3-14b", "Scheduled", "NoStorageClass"),
    "ingress.yaml": ("qwen3-ingress", "Scheduled", "NoStorageClass"),
}
# The cluster does not know its kinds.
NOT_APPLIED = {"gateway.yaml"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def with_test(images: dict[str, str]) -> Iterator[Namespace]:
    """Namespace of the release, with a model for the chart's test."""
    namespace = Namespace(installation.NAMESPACE)
    installation.publish_checkpoint("demo", installation.ROOT / ".cache/demo")
    namespace.mount_directory("models", installation.MODELS)
    namespace.apply(cpu_model("asked"))
    installation.install(images, {"test.model": "asked"})
    yield namespace
    installation.install(images)
    namespace.kubectl("delete", "inferencemodel/asked", "persistentvolumeclaim/models", "--wait=true")
    namespace.kubectl("delete", "persistentvolume", "-l", f"e2e={namespace.name}")


def test_helm_test_and_the_commands_of_the_release_notes_get_answers_of_a_model(with_test: Namespace) -> None:
    """The commands are run as users paste them, with the name of an existing model and a free port."""
    with_test.wait_for_condition("asked", "Ready")
    output = installation.helm("test", installation.RELEASE, "--timeout=600s")
    assert "Phase:          Succeeded" in output, output
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


def test_each_sample_reaches_its_expected_condition(namespace: Namespace, client: ClientPod) -> None:
    assert {sample.name for sample in SAMPLES.iterdir()} == set(EXPECTED) | NOT_APPLIED
    namespace.kubectl("create", "secret", "generic", "hub", "--from-literal=token=hf_x")
    keys = ("--from-literal=AWS_ACCESS_KEY_ID=a", "--from-literal=AWS_SECRET_ACCESS_KEY=b")
    namespace.kubectl("create", "secret", "generic", "minio", *keys)
    namespace.kubectl("create", "secret", "generic", "api-keys", "--from-literal=keys=sk-one-of-ours")
    for name in EXPECTED:
        namespace.kubectl("apply", "-f", str(SAMPLES / name))
    for name, kind, reason in EXPECTED.values():
        status = "True" if kind == "Ready" else "False"
        namespace.wait_for_condition(name, kind, status, reason=reason)
        assert namespace.condition(name, "Accepted")["status"] == "True"
    assert ask(client.openai("demo"), "demo") == ANSWER
