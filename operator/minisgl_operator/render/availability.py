"""PodDisruptionBudgets: the number of pods that node drains may evict at the same time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minisgl_operator.api.objects import Manifest
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.render import names
from minisgl_operator.render.child import child


def frontend_budget(model: InferenceModel) -> Manifest:
    spec = {
        # One at a time, and never none: a budget that forbids the only frontend would block every drain.
        "maxUnavailable": 1,
        # None can answer while no replica serves, as in a model that is suspended; that must not block a drain.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": names.selector(model.name, names.FRONTEND)},
    }
    name = names.frontend(model.name)
    return child(model, "policy/v1", "PodDisruptionBudget", name, names.FRONTEND, {"spec": spec})


def engine_budget(model: InferenceModel, serving: Mapping[str, int]) -> Manifest:
    """At most one replica may be taken, whoever drains how many nodes at the same moment. `serving` has the number of
    pods of each replica, 0 for one that does not serve.

    One budget for all replicas: the API server counts evictions against it one by one, where of several budgets each
    could be used before anybody sees what became of the others. A replica without one of its ranks serves nobody, so
    once one of its pods has gone the others may follow, and no pod of another replica.
    """
    selector: dict[str, Any] = {"matchLabels": names.selector(model.name, names.ENGINE)}
    down = sorted(name for name, pods in serving.items() if not pods)
    up = sum(serving.values())
    if len(serving) == 1:
        # A budget that forbids the only replica would block every drain.
        least = 0
    elif down:
        least = up
        selector["matchExpressions"] = [{"key": names.REPLICA_LABEL, "operator": "NotIn", "values": down}]
    else:
        least = up - 1
    spec = {
        # Not maxUnavailable, which a pod that is just being made again does not count for.
        "minAvailable": least,
        # A broken pod must never keep a node from being drained.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": selector,
    }
    name = names.engine(model.name)
    return child(model, "policy/v1", "PodDisruptionBudget", name, names.ENGINE, {"spec": spec})
