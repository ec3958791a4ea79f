"""The number of replicas that a model shall have, and whether it takes requests. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from minisgl_operator.api.objects import Manifest, parse_time
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.facts.autoscaling import Decision, Load, decide


def autoscaled(
    model: InferenceModel, status: Mapping[str, Any], existing: int, load: Load, now: datetime
) -> Decision | None:
    """The autoscaler's decision; None without spec.autoscaling. `status` is the last status of the model, and
    `existing` its number of replicas, from which a model without a decision continues."""
    settings = model.spec.autoscaling
    if settings is None:
        return None
    previous = _last_decision(status)
    if previous is None:
        previous = Decision(existing or settings.min_replicas)
    return previous if model.spec.suspend else decide(settings, previous, load, now)


def wanted_replicas(model: InferenceModel, decision: Decision | None) -> int:
    if model.spec.suspend:
        return 0
    return model.spec.replicas if decision is None else decision.target


def takes_requests(model_object: Manifest) -> bool:
    """Whether frontends keep requests until a replica serves. False for a model without replicas that no request
    starts: its frontends refuse them. The spec may be invalid."""
    spec = model_object.get("spec") or {}
    if spec.get("suspend") is True:
        return False
    return isinstance(spec.get("autoscaling"), dict) or spec.get("replicas", 1) != 0


def is_at_zero(model_object: Manifest) -> bool:
    """Whether only a request starts the model, by its last status. The spec may be invalid."""
    last = _last_decision(model_object.get("status") or {})
    scaled = isinstance((model_object.get("spec") or {}).get("autoscaling"), dict)
    return scaled and takes_requests(model_object) and last is not None and last.target == 0


def _last_decision(status: Mapping[str, Any]) -> Decision | None:
    found = status.get("autoscaling")
    if found is None:
        return None
    since = found.get("fewerSince")
    return Decision(
        int(found["targetReplicas"]), found.get("fewerReplicas"), None if since is None else parse_time(since)
    )
