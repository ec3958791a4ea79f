"""Ports of the pods by name, as containers, Services and NetworkPolicies declare them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from minisgl.wire.status import CONTROL_PORT, HTTP_PORT, LINK_PORT, SCHEDULER_PORT

_PORTS: Final[Mapping[str, int]] = {
    "http": HTTP_PORT,
    "control": CONTROL_PORT,
    "scheduler": SCHEDULER_PORT,
    "link": LINK_PORT,
}


def container_ports(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "containerPort": _PORTS[name], "protocol": "TCP"} for name in names]


def service_ports(*names: str) -> list[dict[str, Any]]:
    """Ports of a headless Service, which are those of the pods."""
    return [{"name": name, "port": _PORTS[name], "targetPort": name, "protocol": "TCP"} for name in names]


def policy_ports(*names: str) -> list[dict[str, Any]]:
    return [{"port": _PORTS[name], "protocol": "TCP"} for name in names]
