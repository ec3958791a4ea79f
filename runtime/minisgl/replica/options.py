"""What the processes of an engine pod are told."""

from __future__ import annotations

from pathlib import Path

import msgspec

from minisgl import logging as log
from minisgl.config import CacheKind, EngineConfig
from minisgl.launcher.restarts import Limits
from minisgl.replica.pods import Expected


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """The same in all pods."""

    control: int = 8080
    scheduler: int = 5550
    """ZMQ, on pod 0."""
    link: int = 5551
    """On pod 0."""
    rendezvous: int = 5552
    """On pod 0, where there are several."""
    plans: int = 5560
    """Plus the rank's number; of ranks outside of pod 0."""


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
    cache: CacheKind = "radix"
    overlap: bool = True
    log_level: log.LogLevel = "info"
    log_format: log.LogFormat = "auto"
