"""Directories and addresses of the cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

NAME: Final = os.environ.get("MINISGL_CLUSTER", "minisgl")
"""Clusters of different names run side by side."""

CACHE: Final = Path(os.environ.get("MINISGL_CACHE", Path.home() / ".cache/minisgl"))
"""Programs and image layers, by the hash of what they are made from. Each entry is renamed into place when whole."""

STATE: Final = Path("/var/lib") / f"{NAME}-cluster"
HOST_KUBECONFIG: Final = STATE / "host.kubeconfig"

CONTROL_IP: Final = "10.243.0.1"
"""API server, DNS, and router between the nodes."""
API: Final = f"https://{CONTROL_IP}:6443"
PODS: Final = "10.244.0.0/16"
SERVICES: Final = "10.96.0.0/16"
SERVICE_API_IP: Final = "10.96.0.1"

CGROUP: Final = f"/{STATE.name}"


def node_ip(index: int) -> str:
    return f"10.243.0.{10 + index}"


def cgroup_hierarchies() -> list[Path]:
    """Version 1 has one tree for each controller, version 2 one for all."""
    top = Path("/sys/fs/cgroup")
    return [top] if (top / "cgroup.controllers").exists() else [d for d in top.iterdir() if d.is_dir()]
