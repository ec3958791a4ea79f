"""Reconciling and Stalled: what tools that wait for a model ask. They are there only while they are True, as kstatus
(github.com/kubernetes-sigs/cli-utils) takes them: Reconciling means wait, Stalled means that waiting is no use, and
without either of them the model is as its spec says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from minisgl_operator.api.conditions import ConditionType, Reason
from minisgl_operator.api.status import Phase
from minisgl_operator.status.condition import Condition

_AWAITED: Final = frozenset(
    {
        Reason.SECRET_NOT_FOUND,
        Reason.CONFIG_MAP_NOT_FOUND,
        Reason.CLAIM_NOT_FOUND,
        Reason.WEBHOOK_UNAVAILABLE,
    }
)
"""What is missing is often applied together with the model, and comes a little later."""
_GIVEN_UP: Final = frozenset(
    {Reason.ROLLED_BACK, Reason.PROGRESS_DEADLINE_EXCEEDED, Reason.POD_REFUSED, Reason.UPGRADE_FAILED}
)
"""Reasons of Progressing: a change has stopped until the spec or the cluster changes."""
_DOWN: Final = frozenset({Reason.REPLICAS_DOWN, Reason.FRONTENDS_DOWN})


def unsettled(phase: Phase, conditions: Mapping[ConditionType, Condition]) -> dict[ConditionType, Condition]:
    """Stalled, Reconciling, or neither. It repeats the reason and message of the condition that decides."""
    accepted, ready = conditions[ConditionType.ACCEPTED], conditions[ConditionType.READY]
    progressing, degraded = conditions[ConditionType.PROGRESSING], conditions[ConditionType.DEGRADED]
    failed = accepted if accepted.status == "False" else ready if phase == "Failed" else None
    if failed is not None and failed.reason not in _AWAITED:
        return _true(ConditionType.STALLED, failed)
    if progressing.reason in _GIVEN_UP:
        return _true(ConditionType.STALLED, progressing)
    if failed is not None:
        return _true(ConditionType.RECONCILING, failed)
    if progressing.status == "True":
        return _true(ConditionType.RECONCILING, progressing)
    if ready.status != "True":
        return _true(ConditionType.RECONCILING, ready)
    if degraded.reason in _DOWN:
        return _true(ConditionType.RECONCILING, degraded)
    return {}


def _true(type: ConditionType, cause: Condition) -> dict[ConditionType, Condition]:
    return {type: cause._replace(status="True")}
