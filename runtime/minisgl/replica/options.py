"""What the processes of an engine pod are told."""

from __future__ import annotations

from pathlib import Path

import msgspec

from minisgl import logging as log
from minisgl.config import EngineConfig
from minisgl.launcher.restarts import Limits
from minisgl.replica.pods import Expected
from minisgl.wire.status import CONTROL_PORT, LINK_PORT, PLANS_PORT, RENDEZVOUS_PORT, SCHEDULER_PORT


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """TCP ports, the same in all pods of a replica; see `wire.status`."""

    control: int = CONTROL_PORT
    scheduler: int = SCHEDULER_PORT
    link: int = LINK_PORT
    rendezvous: int = RENDEZVOUS_PORT
    plans: int = PLANS_PORT


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `minisgl engine` was asked for."""

    engine: EngineConfig
    """Of any rank; what differs between them is filled in at each start."""
    expected: Expected
    model_name: str
    pod_index: int
    pod: str
    node: str
    leader: str
    """Host of pod 0."""
    ports: Ports
    limits: Limits
    drain_timeout: float
    """Seconds."""
    directory: Path
    """Outlives the container, but not the pod."""
    log_level: log.LogLevel = "info"
    log_format: log.LogFormat = "auto"
