"""The state of a node, as far as it decides about the pods that it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True)
class NodeState:
    """Readiness and taint of a node that exists.

    `not_ready_since`: time of the change to Ready=False or Ready=Unknown; None for a ready node, and for one that has
    never reported. `out_of_service`: a user has tainted it with node.kubernetes.io/out-of-service.
    """

    not_ready_since: datetime | None = None
    out_of_service: bool = False


Nodes = Mapping[str, NodeState]
"""Nodes by name. A node that is missing does not exist."""
