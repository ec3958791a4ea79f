"""Tools of a chat and the choice between them: validation, and the form that chat templates expect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import msgspec

from minisgl.frontend.errors import ApiError
from minisgl.frontend.generation.functions import FUNCTION_NAME, function_definition
from minisgl.frontend.server.json_body import check_fits, invalid, missing, truncate, unsupported
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
_NAMED: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
TOOL_CHOICE_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        _NAMED,
        {
            "type": "object",
            "properties": {
                "type": {"const": "allowed_tools"},
                "allowed_tools": {
                    "type": "object",
                    "properties": {
                        "mode": {"enum": ["auto", "required"]},
                        "tools": {"type": "array", "items": _NAMED},
                    },
                    "required": ["mode", "tools"],
                },
            },
            "required": ["type", "allowed_tools"],
        },
    ]
}
"""Form of `tool_choice`, for /openapi.json."""

_Choice = Literal["none", "auto", "required", "named"]


class ParsedTools(msgspec.Struct, frozen=True):
    options: ToolOptions | None = None
    """None without tools."""
    fields: tuple[str, ...] = ()
    """Path of the parameters of each tool in `options`."""


class _ParsedChoice(msgspec.Struct, frozen=True):
    kind: _Choice
    name: str = ""
    """Name of the named tool."""
    allowed: tuple[str, ...] | None = None
    """Names of the tools that the model may call; None: all."""


def parse_tools(tools: Sequence[dict[str, Any]] | None, choice: Any, parallel: bool | None) -> ParsedTools:
    """Return the tools of a body. `choice` is the value of `tool_choice`. Raises ApiError."""
    definitions = [_definition(tool, f"tools[{i}]") for i, tool in enumerate(tools or ())]
    names = [definition["function"]["name"] for definition in definitions]
    check_unique(names, lambda i: f"tools[{i}].function.name")
    parsed = _parse_choice(choice)
    if not definitions:
        if parsed.kind in ("required", "named") or parsed.allowed is not None:
            raise invalid("tool_choice", "requires `tools`")
        return ParsedTools()
    if parsed.kind == "named" and parsed.name not in names:
        raise _unknown("tool_choice.function.name", parsed.name)
    for i, name in enumerate(parsed.allowed or ()):
        if name not in names:
            raise _unknown(f"tool_choice.allowed_tools.tools[{i}].function.name", name)
    usable = [i for i, name in enumerate(names) if parsed.allowed is None or name in parsed.allowed]
    return ParsedTools(
        ToolOptions(
            definitions=tuple(definitions[i] for i in usable),
            choice=parsed.kind,
            name=parsed.name,
            parallel=parallel is not False,
        ),
        tuple(f"tools[{i}].function.parameters" for i in usable),
    )


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


def _parse_choice(choice: Any) -> _ParsedChoice:
    match choice:
        case None:
            return _ParsedChoice("auto")
        case "none" | "auto" | "required":
            return _ParsedChoice(choice)
        case {"type": "function", "function": {"name": str(name)}}:
            return _ParsedChoice("named", name)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*allowed]}}:
            return _ParsedChoice(mode, allowed=tuple(_allowed(tool, i) for i, tool in enumerate(allowed)))
        case {"type": "custom"}:
            raise unsupported("tool_choice.type", "only functions are supported")
    raise invalid("tool_choice", 'expected "none", "auto", "required" or {"type": "function", "function": {"name": …}}')


def _allowed(tool: Any, number: int) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    path = f"tool_choice.allowed_tools.tools[{number}]"
    raise invalid(path, 'expected {"type": "function", "function": {"name": …}}')


def _unknown(path: str, name: str) -> ApiError:
    return invalid(path, f"no tool is called {truncate(name)!r}; use a name from `tools`")
