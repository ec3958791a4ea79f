"""PodDisruptionBudgets: the number of pods that node drains may evict at the same time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minisgl_operator.api.objects import Manifest
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.render import names, single_node
from minisgl_operator.render.child import child


def has_budgets(model: InferenceModel) -> bool:
    return model.spec.availability.disruption_budget == "Auto"


def frontend_budget(model: InferenceModel) -> Manifest:
    # One at a time, and never 0: a budget that forbids to evict the only frontend would block every drain.
    return _budget(model, names.FRONTEND, {"maxUnavailable": 1}, {})


def engine_budget(model: InferenceModel, ready_pods: Mapping[str, int]) -> Manifest:
    """At most one replica may be evicted, however many nodes are drained at the same time. `ready_pods` is the number
    of pods by replica, 0 for one that is not ready.

    All replicas share one budget: the API server counts evictions against it one by one, while several budgets could
    each be used before the effect on the others is visible. A replica without one of its ranks cannot serve, so after
    one of its pods the others may be evicted, and no pod of another replica.
    """
    down = sorted(name for name, pods in ready_pods.items() if not pods)
    pods = sum(ready_pods.values())
    selector: dict[str, Any] = {}
    if len(ready_pods) == 1 or single_node.claim(model) is not None:
        # A budget that forbids to evict the only replica would block every drain. Replicas that share a ReadWriteOnce
        # claim leave their node together: an evicted one cannot start on another node while one stays.
        least = 0
    elif down:
        least = pods
        selector["matchExpressions"] = [{"key": names.REPLICA_LABEL, "operator": "NotIn", "values": down}]
    else:
        least = pods - 1
    # Not maxUnavailable, which does not count a pod that is being created again.
    return _budget(model, names.ENGINE, {"minAvailable": least}, selector)


def _budget(model: InferenceModel, component: str, limit: dict[str, int], selector: dict[str, Any]) -> Manifest:
    spec = {
        **limit,
        # Pods that are not ready, such as frontends of a suspended model, must never block a drain.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": names.selector(model.name, component)} | selector,
    }
    name = names.budget(model.name, component)
    return child(model, "policy/v1", "PodDisruptionBudget", name, component, {"spec": spec})
