"""Node drains that a disruption budget of the model blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from minisgl_operator.api.objects import Manifest, has_condition, is_deleting
from minisgl_operator.facts.observed import Nodes, Observed
from minisgl_operator.facts.pods import cannot_run, component, node_of
from minisgl_operator.facts.replicas import Replica
from minisgl_operator.render import names


@dataclass(frozen=True)
class BlockedDrain:
    """A budget that allows no eviction of ready pods, because other pods cannot run.

    `nodes`: drained nodes with such pods, at least one. `replicas`: replicas that are down; empty if the budget is that
    of the frontends.
    """

    budget: str
    nodes: tuple[str, ...]
    replicas: tuple[str, ...] = ()


def blocked_drain(model: str, observed: Observed, replicas: Iterable[Replica]) -> BlockedDrain | None:
    """The first drain that cannot end by itself; None without one, and if the operator cannot read nodes. One that
    waits for pods that are starting ends by itself."""
    if observed.nodes is None:
        return None
    down = tuple(replica.name for replica in replicas if replica.failing)
    if down and (found := _drained(model, names.ENGINE, observed, observed.nodes)) is not None:
        return BlockedDrain(*found, down)
    frontends = [pod for pod in observed.pods if component(pod) == names.FRONTEND and not is_deleting(pod)]
    if any(cannot_run(pod) for pod in frontends):
        found = _drained(model, names.FRONTEND, observed, observed.nodes)
        return None if found is None else BlockedDrain(*found)
    return None


def _drained(model: str, part: str, observed: Observed, nodes: Nodes) -> tuple[str, tuple[str, ...]] | None:
    """The component's budget, if it allows no eviction now, and the drained nodes with ready pods of the component."""
    name = names.budget(model, part)
    budget = observed.child("PodDisruptionBudget", name)
    if budget is None or not _allows_none(budget):
        return None
    emptied = {name for name, state in nodes.items() if state.emptied}
    found = sorted({str(node_of(pod)) for pod in observed.pods if _is_kept(pod, part, emptied)})
    return (name, tuple(found)) if found else None


def _allows_none(budget: Manifest) -> bool:
    status = budget.get("status") or {}
    return bool(status.get("expectedPods")) and status.get("disruptionsAllowed") == 0


def _is_kept(pod: Manifest, part: str, emptied: Collection[str]) -> bool:
    """True for a pod that a drain wants to evict and the budget protects: it protects only pods that are ready."""
    return component(pod) == part and node_of(pod) in emptied and has_condition(pod, "Ready") and not is_deleting(pod)
