"""The state of a node, as far as it decides about the pods that it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

Readiness = Literal["True", "False", "Unknown"]
"""Status of a node's condition Ready. A live kubelet writes True or False; the node controller writes Unknown when the
kubelet is silent."""


@dataclass(frozen=True)
class NodeState:
    """Readiness and taints of a node that exists.

    `ready` is True for a node that has never reported. `not_ready_since`: time of the change to False or Unknown; None
    for a ready node. `out_of_service`: a user has tainted it with node.kubernetes.io/out-of-service. `emptied`: it
    takes no more pods, as while `kubectl drain` or a node autoscaler evicts those that it has.
    """

    ready: Readiness = "True"
    not_ready_since: datetime | None = None
    out_of_service: bool = False
    emptied: bool = False


Nodes = Mapping[str, NodeState]
"""Nodes by name. A node that is missing does not exist."""
