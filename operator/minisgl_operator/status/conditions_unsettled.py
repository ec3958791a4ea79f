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
        Reason.CONFLICT,
        Reason.FORBIDDEN,
        Reason.HUB_UNREACHABLE,
        Reason.S3_UNREACHABLE,
        Reason.WEBHOOK_UNAVAILABLE,
    }
)
"""What ends without an edit of the model: what is missing is often applied together with it, and what is in the way is
often being deleted."""
_GIVEN_UP: Final = frozenset(
    {Reason.ROLLED_BACK, Reason.PROGRESS_DEADLINE_EXCEEDED, Reason.POD_REFUSED, Reason.UPGRADE_FAILED}
)
"""Reasons of Progressing: a change has stopped until the spec or the cluster changes."""
_DOWN: Final = frozenset({Reason.REPLICAS_DOWN, Reason.FRONTENDS_DOWN, Reason.DRAIN_BLOCKED})


def unsettled(
    phase: Phase, conditions: Mapping[ConditionType, Condition], given_up: Condition | None
) -> dict[ConditionType, Condition]:
    """Stalled, Reconciling, or neither. It repeats the reason and message of the condition that decides. `given_up`:
    that of a change that does not go on."""
    accepted, ready = conditions[ConditionType.ACCEPTED], conditions[ConditionType.READY]
    progressing, degraded = conditions[ConditionType.PROGRESSING], conditions[ConditionType.DEGRADED]
    failed = accepted if accepted.status == "False" else given_up or (ready if phase == "Failed" else None)
    if failed is not None and failed.reason not in _AWAITED:
        return _true(ConditionType.STALLED, failed)
    if progressing.reason in _GIVEN_UP:
        return _true(ConditionType.STALLED, progressing)
    if failed is not None:
        return _true(ConditionType.RECONCILING, failed)
    frontends = conditions[ConditionType.FRONTEND_READY]
    in_part = frontends.status == "False" and ready.reason is Reason.READY
    for cause, is_one in (
        (ready, ready.status != "True"),
        (progressing, progressing.status == "True"),
        (degraded, degraded.reason in _DOWN),
        (frontends, in_part),
    ):
        if is_one:
            return _true(ConditionType.RECONCILING, cause)
    return {}


def _true(type: ConditionType, cause: Condition) -> dict[ConditionType, Condition]:
    return {type: cause._replace(status="True")}
