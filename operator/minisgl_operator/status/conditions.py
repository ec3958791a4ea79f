"""All conditions of a model. The text of each one is in the file named after its type."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from minisgl_operator.api.conditions import ConditionType
from minisgl_operator.api.text import truncate
from minisgl_operator.facts.facts import Facts
from minisgl_operator.status.condition import Condition
from minisgl_operator.status.conditions_accepted import accepted
from minisgl_operator.status.conditions_degraded import degraded
from minisgl_operator.status.conditions_engine_ready import engine_ready
from minisgl_operator.status.conditions_interconnect_optimal import interconnect_optimal
from minisgl_operator.status.conditions_model_cached import model_cached
from minisgl_operator.status.conditions_progressing import progressing
from minisgl_operator.status.conditions_ready import frontend_ready, ready
from minisgl_operator.status.conditions_route import route_accepted
from minisgl_operator.status.conditions_scheduled import scheduled

Conditions = Mapping[ConditionType, Condition]

_MAX_MESSAGE_LENGTH: Final = 1024


def all_conditions(facts: Facts) -> Conditions:
    """All conditions that the model has, in the order of `ConditionType`."""
    prerequisites = {
        ConditionType.ACCEPTED: accepted(facts),
        ConditionType.MODEL_CACHED: model_cached(facts),
        ConditionType.SCHEDULED: scheduled(facts),
        ConditionType.ENGINE_READY: engine_ready(facts),
        ConditionType.FRONTEND_READY: frontend_ready(facts),
    }
    route = route_accepted(facts)
    return {
        **prerequisites,
        ConditionType.READY: ready(facts, prerequisites),
        ConditionType.PROGRESSING: progressing(facts),
        ConditionType.DEGRADED: degraded(facts),
        ConditionType.INTERCONNECT_OPTIMAL: interconnect_optimal(facts),
        **({} if route is None else {ConditionType.ROUTE_ACCEPTED: route}),
    }


def as_status(
    conditions: Conditions, generation: int, previous: Mapping[str, Any], now: datetime
) -> list[dict[str, Any]]:
    """The conditions as `status.conditions`. lastTransitionTime changes only when `status` does."""
    before = {condition["type"]: condition for condition in previous.get("conditions") or ()}
    result, time = [], now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for type, condition in conditions.items():
        last = before.get(type.value, {})
        result.append(
            {
                "type": type.value,
                "status": condition.status,
                "reason": condition.reason.value,
                "message": truncate(condition.message, _MAX_MESSAGE_LENGTH),
                "observedGeneration": generation,
                "lastTransitionTime": last["lastTransitionTime"] if last.get("status") == condition.status else time,
            }
        )
    return result
