"""Who decides about the number of frontends: the model's spec, another manager of the Deployment, or nobody so far.

An apply with the number that was observed would undo a change of an autoscaler that comes in between. So the field is
left out as long as another one owns it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from minisgl_operator.api.objects import Manifest
from minisgl_operator.render import names


def owners_of_count(managed_fields: Iterable[Manifest]) -> list[dict[str, Any]]:
    """The entries of managedFields that own spec.replicas, without their other fields."""
    return [
        {"manager": each.get("manager"), "fieldsV1": {"f:spec": {"f:replicas": {}}}}
        for each in managed_fields
        if "f:replicas" in ((each.get("fieldsV1") or {}).get("f:spec") or {})
    ]


def count_to_apply(wanted: int | None, deployment: Manifest | None) -> int | None:
    """Number of frontends for the next apply; None leaves it to another manager that owns it. `wanted`: the spec's,
    which comes first. Without any other owner it stays as it is, and a new Deployment has 1."""
    if wanted is not None:
        return wanted
    if deployment is None:
        return 1
    owners = owners_of_count(deployment["metadata"].get("managedFields") or ())
    if any(each["manager"] != names.FIELD_MANAGER for each in owners):
        return None
    return int(deployment["spec"]["replicas"])
