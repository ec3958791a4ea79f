"""How much a model reasons, as variables of its chat template."""

from __future__ import annotations

from typing import Any, Final

THINKING_VARIABLES: Final = ("enable_thinking", "thinking")
"""Variables that let the model reason, or not: checkpoints have one or the other."""


def set_effort(effort: str | None, variables: dict[str, Any]) -> None:
    """Add the variables for an effort, `none` or a level, to those of a request, which have precedence."""
    if effort is None:
        return
    if effort != "none":
        variables.setdefault("reasoning_effort", effort)
    for name in THINKING_VARIABLES:
        variables.setdefault(name, effort != "none")
