"""The commands of the Kubernetes page, as they are written there, on a real API server without nodes."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import tools
from support.control_plane import LocalControlPlane, control_plane_or_skip

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "kubernetes.md"

NEEDS_NODES = ("kubectl port-forward",)
NEEDS_A_PERSON = ("kubectl edit",)


@pytest.fixture
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalControlPlane]:
    """A control plane of its own, for the page removes everything in the end."""
    with control_plane_or_skip(tmp_path_factory.mktemp("docs")) as running:
        yield running


def shown_commands(page: str) -> list[str]:
    """Lines of shell blocks and commands in the first column of tables, in the order of the page."""
    found = re.findall(r"```sh\n(.*?)```|^\| `(kubectl [^`]+)`", page, re.DOTALL | re.MULTILINE)
    return [line for block, cell in found for line in (block or cell).splitlines() if line]


def test_commands_of_the_page_work(empty: LocalControlPlane, tmp_path: Path) -> None:
    for name in ("kubectl", "helm"):
        (tmp_path / name).symlink_to(tools.program(name))
    environment = os.environ | {"KUBECONFIG": str(empty.kubeconfig), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    commands = shown_commands(PAGE.read_text())
    assert {"helm install", "kubectl apply", "kubectl wait", "kubectl scale", "helm uninstall"} <= {
        " ".join(command.split()[:2]) for command in commands
    }
    for command in commands:
        if command.startswith("docker build"):
            assert (ROOT / command.split()[3]).is_file(), command
            continue
        if command.startswith((*NEEDS_NODES, *NEEDS_A_PERSON)):
            continue
        if command.startswith("kubectl wait"):
            say_ready(empty, "qwen3")
        done = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    left = json.loads(empty.kubectl("get", "deployments", "--all-namespaces", "-o", "json").stdout)["items"]
    assert left == []


def say_ready(control_plane: LocalControlPlane, name: str) -> None:
    """What the operator would say once the model is served."""
    condition = {
        "type": "Ready",
        "status": "True",
        "reason": "Routable",
        "message": "",
        "observedGeneration": 1,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    patch = json.dumps({"status": {"conditions": [condition]}})
    control_plane.kubectl("patch", "imodel", name, "--subresource=status", "--type=merge", "-p", patch)
