"""The phase of a model: a summary of its conditions in one word."""

from __future__ import annotations

from collections.abc import Mapping

from minisgl_operator.api.conditions import ConditionType
from minisgl_operator.api.status import Phase
from minisgl_operator.facts.facts import Facts
from minisgl_operator.status.condition import Condition


def phase_of(facts: Facts, conditions: Mapping[ConditionType, Condition]) -> Phase:
    status = {type: condition.status for type, condition in conditions.items()}
    if facts.is_idle and facts.fetch_has_failed:
        return "Failed"
    if not facts.replicas:
        return "Idle" if facts.is_idle else "Suspended"
    if status[ConditionType.READY] == "True":
        if status[ConditionType.DEGRADED] == "True":
            return "Degraded"
        return "Updating" if status[ConditionType.PROGRESSING] == "True" else "Ready"
    if status[ConditionType.ACCEPTED] == "False":
        return "Failed"
    if status[ConditionType.MODEL_CACHED] == "False":
        return "Failed" if facts.fetch_has_failed else "Caching"
    if all(replica.phase == "Failed" for replica in facts.replicas):
        return "Failed"
    if status[ConditionType.SCHEDULED] == "False":
        return "Pending"
    return "Degraded" if status[ConditionType.DEGRADED] == "True" else "Starting"
