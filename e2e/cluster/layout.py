"""Directories and addresses of the cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

NAME: Final = os.environ.get("MINISGL_CLUSTER", "minisgl")
"""Name of the cluster; clusters of different names can run at the same time."""

CACHE: Final = Path(os.environ.get("BUILD_CACHE", Path.home() / ".cache/minisgl"))
"""Programs and image layers by the hash of their sources. An entry is renamed to its final name when it is complete."""

STATE: Final = Path("/var/lib") / f"{NAME}-cluster"
HOST_KUBECONFIG: Final = STATE / "host.kubeconfig"

IPV6: Final = os.environ.get("MINISGL_IP_FAMILY", "4") == "6"
"""True for a cluster with IPv6 only. Its places have 127.0.0.1 for components that talk to themselves, and no other
IPv4 address."""

GO: Final = {"GOGC": "200"}
"""Environment of components, which are written in Go: memory is there, cores are short."""

_LAN: Final = "fd00:10:243::" if IPV6 else "10.243.0."
LAN_BITS: Final = 64 if IPV6 else 24
"""Length of the prefix of the network of the nodes."""
CONTROL_IP: Final = f"{_LAN}1"
"""Address of API server, DNS, and router between the nodes."""
STORAGE_IP: Final = f"{_LAN}2"
"""Second address of the place "control", for programs of tests."""
PODS: Final = "fd00:10:244::/48" if IPV6 else "10.244.0.0/16"
SERVICES: Final = "fd00:10:96::/112" if IPV6 else "10.96.0.0/16"
SERVICE_API_IP: Final = "fd00:10:96::1" if IPV6 else "10.96.0.1"
ADDRESS_BITS: Final = 128 if IPV6 else 32
ANYWHERE: Final = "::/0" if IPV6 else "0.0.0.0/0"
BRIDGE_MAC: Final = "0a:00:00:00:00:01"
"""Address of each bridge, all in networks of their own. Without one a bridge takes the lowest of its ports', and when
that one leaves, with its pod or its node, the others send to the old address for many seconds."""

CGROUP: Final = f"/{STATE.name}"


def node_ip(index: int) -> str:
    return f"{_LAN}{10 + index}"


def node_pods(index: int) -> tuple[str, str]:
    """Range of the pods of a node, and the address of the node's bridge in it."""
    if IPV6:
        return f"fd00:10:244:{index}::/64", f"fd00:10:244:{index}::1"
    return f"10.244.{index}.0/24", f"10.244.{index}.1"


def in_url(ip: str) -> str:
    """An address as a URL contains it."""
    return f"[{ip}]" if ":" in ip else ip


API: Final = f"https://{in_url(CONTROL_IP)}:6443"


def cgroup_hierarchies() -> list[Path]:
    """Roots of the control group trees: version 1 has one per controller, version 2 a single one."""
    top = Path("/sys/fs/cgroup")
    return [top] if (top / "cgroup.controllers").exists() else [d for d in top.iterdir() if d.is_dir()]
