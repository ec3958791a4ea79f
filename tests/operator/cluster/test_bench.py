"""The benchmark of the operator completes. Its figures need a quiet machine, and are not checked here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster.control_plane import LocalControlPlane

ROOT = Path(__file__).parents[3]
FOLDERS = ("runtime", "operator", "tests", "e2e")


@pytest.fixture
def without_controllers(control_plane: LocalControlPlane) -> Iterator[LocalControlPlane]:
    """The control plane without controllers, from which the benchmark's objects are removed before they run again."""
    before = _namespaces_and_nodes(control_plane)
    control_plane.stop("kube-controller-manager")
    yield control_plane
    if made := _namespaces_and_nodes(control_plane) - before:
        control_plane.kubectl("delete", "--wait=false", *made)
    control_plane.start("kube-controller-manager")


def _namespaces_and_nodes(control_plane: LocalControlPlane) -> set[str]:
    return set(control_plane.kubectl("get", "namespaces,nodes", "-o", "name").stdout.split())


@pytest.mark.timeout(600)
def test_it_prints_and_writes_its_figures(without_controllers: LocalControlPlane, tmp_path: Path) -> None:
    command = [
        *(sys.executable, str(ROOT / "benchmarks/operator/bench.py")),
        f"--kubeconfig={without_controllers.kubeconfig}",
    ]
    done = subprocess.run(
        [*command, "--models=5", "--nodes=3", f"--json={tmp_path / 'figures.json'}"],
        env={**os.environ, "PYTHONPATH": ":".join(str(ROOT / folder) for folder in FOLDERS)},
        text=True,
        capture_output=True,
        timeout=500,
        check=False,
    )
    assert "cold_to_steady_s" in done.stdout, done.stdout + done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert figures["models"] == 5 and figures["nodes"] == 3 and figures["objects"] == 3 * 11 + 2 * 8
    assert 0 < figures["rss_mib"] < 300
