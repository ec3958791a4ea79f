"""Variables that a request gives to the chat template, and whether the model reasons, for which APIs have fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from minisgl.frontend.server.json_body import check_fits, invalid
from minisgl.wire.text import THINKING_VARIABLES

FIELD: Final = "chat_template_kwargs"
RESERVED: Final = (
    *("messages", "tools", "documents", "add_generation_prompt"),
    *("continue_final_message", "chat_template", "tokenize"),
)
"""Variables that requests set with fields, and arguments of functions of transformers that render templates."""


def template_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the variables in `chat_template_kwargs`. Raises ApiError."""
    variables = dict(given or {})
    check_fits(variables, FIELD)
    for name in RESERVED:
        if name in variables:
            raise invalid(
                FIELD, f"`{name}` cannot be given as a variable; use the field of the request, if there is one"
            )
    return variables


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
