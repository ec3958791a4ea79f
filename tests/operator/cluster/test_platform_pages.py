"""The pages about platforms on a real API server without nodes: their commands, values and objects."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cluster import tools
from minisgl_operator.api.defaults import Defaults
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.render import render
from minisgl_operator.shell.config import add_arguments, parse
from support.cluster.chart import CHART, NAMESPACE
from support.cluster.control_plane import LocalControlPlane, control_plane_or_skip
from support.cluster.foreign_kinds import define

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs" / "platforms").glob("*.md"))
GUIDE = ROOT / "docs" / "kubernetes.md"
MODELS = "chat"

# Programs of the platforms, which need an account or a daemon.
FOREIGN_PROGRAMS = ("aws", "gcloud", "oc")
# Kinds of the platforms: the API server gets definitions that accept every field.
FOREIGN_KINDS = {
    "monitoring.coreos.com/v1": ("PodMonitor", "ServiceMonitor"),
    "monitoring.googleapis.com/v1": ("PodMonitoring",),
    "cloud.google.com/v1": ("BackendConfig",),
    "route.openshift.io/v1": ("Route",),
    "security.istio.io/v1": ("PeerAuthentication",),
    "snapshot.storage.k8s.io/v1": ("VolumeSnapshot",),
}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalControlPlane]:
    """A separate control plane, as pages install the chart."""
    with control_plane_or_skip(tmp_path_factory.mktemp("platforms")) as running:
        define(running, FOREIGN_KINDS)
        yield running


@pytest.fixture
def installed_once(plane: LocalControlPlane) -> Iterator[LocalControlPlane]:
    """The control plane, from which the page's release and namespaces are removed again."""
    yield plane
    program = str(tools.program("helm"))
    command = [program, "uninstall", "minisgl", "--namespace", NAMESPACE, "--ignore-not-found"]
    subprocess.run(command, env=os.environ | {"KUBECONFIG": str(plane.kubeconfig)}, check=True, timeout=120)
    plane.kubectl("delete", "namespace", NAMESPACE, MODELS, "minisgl", "--ignore-not-found")
    plane.kubectl("delete", "storageclass,runtimeclass", "--all")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_the_page_work(page: Path, installed_once: LocalControlPlane, tmp_path: Path) -> None:
    """Commands run as written, in a directory with the files that the page shows."""
    plane = installed_once
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("kubectl", "helm"):
        (programs / name).symlink_to(tools.program(name))
    # tests/images has what it builds and pushes.
    (programs / "docker").write_text("#!/bin/sh\n")
    (programs / "docker").chmod(0o755)
    (tmp_path / "charts").symlink_to(CHART)
    for name in ("Makefile", "images", "runtime"):
        (tmp_path / name).symlink_to(ROOT / name)
    files = shown_files(page)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    environment = os.environ | {"KUBECONFIG": str(plane.kubeconfig), "PATH": f"{programs}:{os.environ['PATH']}"}
    commands = shown_commands(page)
    assert any(command.startswith("helm install") for command in commands)
    assert any(command.startswith("make images-push") for command in commands) == ("imageRegistry" in page.read_text())
    for command in commands:
        if command.startswith(FOREIGN_PROGRAMS):
            continue
        if waited := re.match(r"kubectl wait (\S+) .*--for=condition=(\S+)", command):
            say_true(plane, *waited.groups())
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    used = {word for command in commands for word in command.split()}
    assert files.keys() <= used, "a file is shown that no command uses"
    check_children(plane)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_guide_links_to_the_page(page: Path) -> None:
    assert f"(platforms/{page.name})" in GUIDE.read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_publishes_the_api_alone(page: Path) -> None:
    """Metrics, the chat page and probes need no key."""
    objects = [each for text in shown_files(page).values() for each in yaml.safe_load_all(text)]
    by_kind = {each["kind"]: each["spec"] for each in objects if "spec" in each}
    assert by_kind.get("Service", {}).get("type", "ClusterIP") == "ClusterIP", "it would publish every path"
    paths = [rule["path"] for rules in by_kind.get("Ingress", {}).get("rules", ()) for rule in rules["http"]["paths"]]
    assert "defaultBackend" not in by_kind.get("Ingress", {})
    if "Route" in by_kind:
        paths.append(by_kind["Route"].get("path"))
    assert set(paths) <= {"/v1"}


def check_children(plane: LocalControlPlane) -> None:
    """Assert that the API server accepts everything that the operator of the release would create for the models."""
    defaults = running_defaults(plane)
    plane.kubectl("label", "namespace", MODELS, "pod-security.kubernetes.io/warn=restricted")
    models = json.loads(plane.kubectl("get", "imodel", "-n", MODELS, "-o", "json").stdout)["items"]
    assert models
    done = plane.try_out(child for raw in models for child in render(InferenceModel.parse(raw), defaults))
    assert "would violate" not in done.stderr, done.stderr


def running_defaults(plane: LocalControlPlane) -> Defaults:
    """Defaults that the chart's values give the installed operator."""
    found = plane.kubectl("get", "deployment", "minisgl-operator", "-n", NAMESPACE, "-o", "json").stdout
    arguments = json.loads(found)["spec"]["template"]["spec"]["containers"][0]["args"]
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser, {})
    known, _ = parser.parse_known_args([each.replace("$(POD_NAMESPACE)", NAMESPACE) for each in arguments[1:]])
    return parse(known, {}).defaults


def shown_files(page: Path) -> dict[str, str]:
    """YAML blocks by the file name in their first line, which each must have."""
    blocks = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    names = [re.match(r"# (\S+\.yaml)\n", block) for block in blocks]
    assert all(names), page.name
    found = {name[1]: block for name, block in zip(names, blocks, strict=True) if name}
    assert len(found) == len(blocks), "two files have one name"
    assert all(list(yaml.safe_load_all(text)) for text in found.values())
    return found


def shown_commands(page: Path) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


def say_true(plane: LocalControlPlane, model: str, condition: str) -> None:
    """Status that the operator would write once the model has reached the condition."""
    found = {
        "type": condition,
        "status": "True",
        "reason": condition,
        "message": "",
        "observedGeneration": 1,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    patch = json.dumps({"status": {"conditions": [found]}})
    plane.kubectl("patch", model, "-n", MODELS, "--subresource=status", "--type=merge", "-p", patch)
