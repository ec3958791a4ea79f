"""Directories and addresses of the cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

NAME: Final = os.environ.get("MINISGL_CLUSTER", "minisgl")
"""Name of the cluster; clusters of different names can run at the same time."""

CACHE: Final = Path(os.environ.get("MINISGL_CACHE", Path.home() / ".cache/minisgl"))
"""Programs and image layers by the hash of their sources. An entry is renamed to its final name when it is complete."""

STATE: Final = Path("/var/lib") / f"{NAME}-cluster"
HOST_KUBECONFIG: Final = STATE / "host.kubeconfig"

CONTROL_IP: Final = "10.243.0.1"
"""Address of API server, DNS, and router between the nodes."""
API: Final = f"https://{CONTROL_IP}:6443"
PODS: Final = "10.244.0.0/16"
SERVICES: Final = "10.96.0.0/16"
SERVICE_API_IP: Final = "10.96.0.1"

CGROUP: Final = f"/{STATE.name}"


def node_ip(index: int) -> str:
    return f"10.243.0.{10 + index}"


def cgroup_hierarchies() -> list[Path]:
    """Roots of the control group trees: version 1 has one per controller, version 2 a single one."""
    top = Path("/sys/fs/cgroup")
    return [top] if (top / "cgroup.controllers").exists() else [d for d in top.iterdir() if d.is_dir()]
