"""Whether the model reasons, from the fields that APIs have for it."""

from __future__ import annotations

from typing import Any, Final

from minisgl.frontend.server.json_body import invalid
from minisgl.wire.text import THINKING_VARIABLES

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def parse_thinking(
    effort: str | None, thinking: bool | None, variables: dict[str, Any], param: str = "reasoning_effort"
) -> bool | None:
    """Return `Generate.thinking` for a level of effort, in the field `param`, and an explicit choice. Adds the level to
    `variables`, those of the chat template, which keep what they contain. Raises ApiError."""
    if effort is None:
        return thinking
    if effort not in EFFORTS:
        raise invalid(param, f"expected one of {', '.join(EFFORTS)}")
    if effort == "none":
        return False if thinking is None else thinking
    variables.setdefault("reasoning_effort", effort)
    if thinking is None:
        # Only variables: a model without reasoning, or without levels of it, accepts any effort.
        for name in THINKING_VARIABLES:
            variables.setdefault(name, True)
    return thinking
