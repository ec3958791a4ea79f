"""Tools of a chat and the choice between them: validation, and the form that chat templates expect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from minisgl.frontend.generation.functions import FUNCTION_NAME, function_definition
from minisgl.frontend.server.json_body import invalid, missing, truncate, unsupported
from minisgl.frontend.server.json_values import check_fits
from minisgl.wire.text import ToolOptions

TOOL_SCHEMA: Final[dict[str, Any]] = {
    "properties": {
        "type": {"enum": ["function", None]},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": FUNCTION_NAME},
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"], "properties": {"type": {"const": "object"}}},
                "strict": {"type": ["boolean", "null"]},
            },
            "required": ["name"],
        },
    },
    "required": ["function"],
}
"""Form of one of `tools`, for /openapi.json."""
TOOL_CHOICE_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            },
            "required": ["type", "function"],
        },
    ]
}
"""Form of `tool_choice`, for /openapi.json."""

_Choice = Literal["none", "auto", "required", "named"]


def parse_tools(tools: Sequence[dict[str, Any]] | None, choice: Any, parallel: bool | None) -> ToolOptions | None:
    """Return the tools of a body; None without any. `choice` is the value of `tool_choice`. Raises ApiError."""
    definitions = tuple(_definition(tool, f"tools[{i}]") for i, tool in enumerate(tools or ()))
    names = [definition["function"]["name"] for definition in definitions]
    check_unique(names, lambda i: f"tools[{i}].function.name")
    kind, name = _parse_choice(choice)
    if kind in ("required", "named") and not definitions:
        raise invalid("tool_choice", "requires `tools`")
    if kind == "named" and name not in names:
        raise invalid("tool_choice.function.name", f"no tool is called {truncate(name)!r}; use a name from `tools`")
    if not definitions:
        return None
    return ToolOptions(definitions=definitions, choice=kind, name=name, parallel=parallel is not False)


def check_unique(names: Sequence[str], path: Callable[[int], str]) -> None:
    """Raises ApiError for a tool with the name of an earlier one. `path`: place of a tool's name by its number."""
    for i, name in enumerate(names):
        if name in names[:i]:
            raise invalid(path(i), f"another tool is called {name!r}; use unique names")


def _definition(tool: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the tool without null fields, which are as good as absent."""
    tool = _without_nulls(tool)
    if tool.get("type", "function") != "function":
        raise unsupported(f"{path}.type", 'only tools of the type "function" are supported')
    if "function" not in tool:
        raise missing(f"{path}.function")
    if not isinstance(tool["function"], dict):
        raise invalid(f"{path}.function", "expected an object")
    check_fits(tool, path)
    return function_definition(_without_nulls(tool["function"]), f"{path}.function") | {
        name: value for name, value in tool.items() if name not in ("type", "function")
    }


def _without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    return {name: item for name, item in value.items() if item is not None}


def _parse_choice(choice: Any) -> tuple[_Choice, str]:
    """Return the choice and the name of the named tool."""
    match choice:
        case None:
            return "auto", ""
        case "none" | "auto" | "required":
            return choice, ""
        case {"type": "function", "function": {"name": str(name)}}:
            return "named", name
        case {"type": "allowed_tools" | "custom"}:
            raise unsupported("tool_choice.type", "not supported; name a function, or leave tools out of `tools`")
    raise invalid("tool_choice", 'expected "none", "auto", "required" or {"type": "function", "function": {"name": …}}')
