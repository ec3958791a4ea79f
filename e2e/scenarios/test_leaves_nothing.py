"""Starting and stopping a cluster leaves the host unchanged."""

from __future__ import annotations

import os
import subprocess
import sys

from harness import installation
from harness.host import snapshot

NAME = "minisgl-passing"


def cluster(*arguments: str) -> None:
    environment = {**os.environ, "MINISGL_CLUSTER": NAME, "PYTHONPATH": str(installation.ROOT / "e2e")}
    subprocess.run([sys.executable, "-m", "cluster", *arguments], env=environment, check=True)


def test_down_restores_the_state_of_the_host() -> None:
    state = f"/var/lib/{NAME}-cluster"
    cluster("down")
    before = snapshot(state)
    try:
        cluster("up", "--nodes", "1")
        during = snapshot(state)
    finally:
        cluster("down")
    after = snapshot(state)
    assert during["processes"]
    # Even while it runs, all its resources are in separate namespaces.
    for kind in ("mounts", "links", "addresses", "routes", "rules", "network namespaces", "sysctls"):
        assert during[kind] == before[kind], kind
    assert after == before
