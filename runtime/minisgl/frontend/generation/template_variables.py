"""Variables that a request gives to the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from minisgl.frontend.server.json_body import invalid
from minisgl.frontend.server.json_values import check_fits

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
