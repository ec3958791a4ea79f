"""The upgrade of a model to the pods of a new operator: `status.rollout.upgrade`, and the part of Progressing."""

from __future__ import annotations

from typing import Any, Final

from minisgl_operator.api.conditions import Reason
from minisgl_operator.facts.facts import Facts
from minisgl_operator.status.condition import Condition

_KEEPS_VERSION: Final = ("Waiting", "Excluded")
"""States in which a model with pods of an earlier operator has not begun to replace them."""
_OPT_OUT = "set spec.rollout.upgrade to Immediate to take the new version now"


def upgrade_status(facts: Facts) -> dict[str, Any] | None:
    """`status.rollout.upgrade`; None if the operator upgrades all models at once."""
    upgrade = facts.upgrade
    if upgrade is None:
        return None
    result: dict[str, Any] = {"state": upgrade.state}
    if facts.turn is not None:
        result["wave"] = facts.turn.wave
    if upgrade.state not in _KEEPS_VERSION:
        result["target"] = upgrade.target
    if upgrade.spec_hash is not None:
        result["specHash"] = upgrade.spec_hash
    return result


def upgrade_failed(facts: Facts) -> Condition | None:
    """The condition of a model whose upgrade failed, and for which all other models wait."""
    if facts.upgrade is None or facts.upgrade.state != "Failed":
        return None
    cause = facts.progress.failure or "see EngineReady and FrontendReady for the cause"
    message = (
        f"The upgrade to the operator's new version failed: {cause}. No other model is upgraded until this one serves "
        "with it. Correct the spec, or set spec.rollout.upgrade to Never to leave this model out, or roll the operator "
        "back."
    )
    return Condition("False", Reason.UPGRADE_FAILED, message)


def upgrade_waiting(facts: Facts) -> Condition | None:
    """The condition of a model that keeps the pods of an earlier operator."""
    if facts.upgrade is None or facts.upgrade.state not in _KEEPS_VERSION:
        return None
    return Condition("False", Reason.UPGRADE_WAITING, f"The model keeps its version: {_awaited(facts)}")


def _awaited(facts: Facts) -> str:
    rollout, turn = facts.model.spec.rollout, facts.turn
    if rollout.upgrade == "Never":
        return f"spec.rollout.upgrade is Never. Edit the spec, or {_OPT_OUT}."
    if rollout.paused:
        return "spec.rollout.paused is true. Set it to false to let it take its turn."
    assert turn is not None
    if facts.upgrade is not None and facts.upgrade.state == "Excluded":
        return f"it takes its turn in wave {turn.wave} when it is Ready. Correct the spec, or {_OPT_OUT}."
    if turn.failed:
        return (
            f"upgrades have stopped, as that of {turn.failed} failed. See the condition Progressing there, or "
            f"{_OPT_OUT}."
        )
    if turn.current_wave and turn.current_wave != turn.wave:
        return f"wave {turn.wave} begins when all models of wave {turn.current_wave} serve the new version."
    if turn.opens_at is not None:
        return f"upgrades of wave {turn.wave} begin in the next window of the operator's settings."
    return f"it waits for its turn in wave {turn.wave}."
