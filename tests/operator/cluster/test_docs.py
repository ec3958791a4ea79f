"""The commands of the pages about Kubernetes, verbatim, on a real API server without nodes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cluster import tools
from support.cluster.chart import MANIFESTS, Object, kustomized, pods, rendered
from support.cluster.control_plane import LocalControlPlane, control_plane_or_skip

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs" / "kubernetes.md"
FURTHER_PAGES = [ROOT / "docs" / f"{name}.md" for name in ("rollouts", "placement", "metrics")]

NEEDS_NODES = ("kubectl port-forward",)
NEEDS_A_PERSON = ("kubectl edit",)
NEEDS_THE_HUB = ("minisgl serve",)


@pytest.fixture
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalControlPlane]:
    """A separate control plane, as the page removes everything at the end."""
    with control_plane_or_skip(tmp_path_factory.mktemp("docs")) as running:
        yield running


def pages() -> str:
    """Text of all pages, those about an installed operator before the guide's last section, which removes it."""
    before, heading, after = GUIDE.read_text().partition("## Remove\n")
    assert heading
    return "\n".join([before, *(page.read_text() for page in FURTHER_PAGES), heading, after])


def shown_commands(page: str) -> list[str]:
    """Lines of shell blocks and commands in the first column of tables, in the order of the page."""
    found = re.findall(r"```sh\n(.*?)```|^\| `(kubectl [^`]+)`", page, re.DOTALL | re.MULTILINE)
    return [line for block, cell in found for line in (block or cell).splitlines() if line]


def test_commands_of_the_pages_work(empty: LocalControlPlane, tmp_path: Path) -> None:
    for name in ("kubectl", "helm"):
        (tmp_path / name).symlink_to(tools.program(name))
    # tests/images has what it builds and pushes.
    (tmp_path / "docker").write_text("#!/bin/sh\n")
    (tmp_path / "docker").chmod(0o755)
    environment = os.environ | {"KUBECONFIG": str(empty.kubeconfig), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    commands = shown_commands(pages())
    shown = [" ".join(command.split()[:2]) for command in commands]
    assert {"make images-push", "helm install", "kubectl apply", "kubectl wait", "kubectl scale"} <= {*shown}
    assert shown.index("helm upgrade") < shown.index("helm uninstall")
    for command in commands:
        if command.startswith((*NEEDS_NODES, *NEEDS_A_PERSON, *NEEDS_THE_HUB)):
            continue
        if command.startswith("kubectl wait"):
            say_ready(empty, "qwen3")
        done = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    left = json.loads(empty.kubectl("get", "deployments", "--all-namespaces", "-o", "json").stdout)["items"]
    assert left == []


def shown_documents() -> list[Object]:
    """YAML documents of the pages: objects, and values of the chart, which have no kind."""
    blocks = re.findall(r"```yaml\n(.*?)```", pages(), re.DOTALL)
    return [each for block in blocks for each in yaml.safe_load_all(block)]


def shown_objects(kind: str | None = None) -> list[Object]:
    return [each for each in shown_documents() if "kind" in each and kind in (None, each["kind"])]


def test_objects_of_the_pages_are_accepted(control_plane: LocalControlPlane) -> None:
    control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-k", str(MANIFESTS / "crd"))
    # A Kustomization is the configuration of a program.
    objects = [each for each in shown_objects() if each["kind"] != "Kustomization"]
    kinds = {"PersistentVolumeClaim", "Pod", "InferenceModel", "ResourceClaimTemplate", "HorizontalPodAutoscaler"}
    assert {each["kind"] for each in objects} == kinds
    control_plane.try_out(objects)


def test_the_documented_overlay_equals_the_chart_with_a_registry(tmp_path: Path) -> None:
    shutil.copytree(MANIFESTS, tmp_path / "manifests")
    (tmp_path / "my-cluster").mkdir()
    [overlay] = shown_objects("Kustomization")
    (tmp_path / "my-cluster" / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    [ours] = pods(kustomized(tmp_path / "my-cluster"))
    [charts] = pods(rendered({"imageRegistry": "registry.example.com"}))
    assert ours == charts


def test_values_of_the_pages_are_values_of_the_chart() -> None:
    found = [each for each in shown_documents() if "kind" not in each]
    assert found
    for values in found:
        rendered(values)


def say_ready(control_plane: LocalControlPlane, name: str) -> None:
    """Status that the operator would write once the model is ready."""
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
