"""The numbers of replicas and of frontends that a model shall have, and whether it takes requests. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from minisgl_operator.api.objects import Manifest, parse_time
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.facts.autoscaling import Decision, Load, decide
from minisgl_operator.render import names


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


def frontends_to_apply(wanted: int | None, deployment: Manifest | None) -> int | None:
    """Number of frontends for the next apply; None leaves it to another manager that owns it. `wanted`: the spec's,
    which comes first. Without any other owner it stays as it is, but for none, and a new Deployment has 1.

    An apply with the number that was observed would undo a change of an autoscaler that comes in between. So the field
    is left out as long as another one owns it.
    """
    if wanted is not None:
        return wanted
    if deployment is None:
        return 1
    owners = owners_of_count(deployment["metadata"].get("managedFields") or ())
    if any(each["manager"] != names.FIELD_MANAGER for each in owners):
        return None
    return max(int(deployment["spec"]["replicas"]), 1)


def owners_of_count(managed_fields: Iterable[Manifest]) -> list[dict[str, Any]]:
    """The entries of managedFields that own spec.replicas, without their other fields."""
    return [
        {"manager": each.get("manager"), "fieldsV1": {"f:spec": {"f:replicas": {}}}}
        for each in managed_fields
        if "f:replicas" in ((each.get("fieldsV1") or {}).get("f:spec") or {})
    ]


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
