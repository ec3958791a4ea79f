"""How many pods a node drain may take at once."""

from __future__ import annotations

from minisgl_operator import names
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.observed import Manifest
from minisgl_operator.render.child import child


def frontend_budget(model: InferenceModel) -> Manifest:
    spec = {
        # One at a time, and never none: a budget that forbids the only frontend would block every drain.
        "maxUnavailable": 1,
        "selector": {"matchLabels": names.selector(model.name, names.FRONTEND)},
    }
    name = names.frontend(model.name)
    return child(model, "policy/v1", "PodDisruptionBudget", name, names.FRONTEND, {"spec": spec})


def replica_budget(model: InferenceModel, index: int, *, may_go: bool) -> Manifest:
    """A replica without one of its ranks serves nobody, so its pods go all or none."""
    name = names.replica(model.name, index)
    spec = {
        "maxUnavailable": "100%" if may_go else 0,
        # A broken pod must never keep a node from being drained.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": names.selector(model.name, names.ENGINE) | {names.REPLICA_LABEL: name}},
    }
    labels = {names.REPLICA_LABEL: name}
    return child(model, "policy/v1", "PodDisruptionBudget", name, names.ENGINE, {"spec": spec}, labels=labels)
