"""The benchmark of the operator completes. Its figures need a quiet machine, and are not checked here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.cluster.control_plane import LocalControlPlane, running_control_plane

ROOT = Path(__file__).parents[3]
FOLDERS = ("runtime", "operator", "tests", "e2e")


@pytest.mark.timeout(600)
def test_it_prints_and_writes_its_figures(control_plane: LocalControlPlane, tmp_path: Path) -> None:
    del control_plane  # skips where no control plane is available
    with running_control_plane(tmp_path / "plane") as plane:
        plane.stop("kube-controller-manager")
        command = [sys.executable, str(ROOT / "benchmarks/operator/bench.py"), f"--kubeconfig={plane.kubeconfig}"]
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
