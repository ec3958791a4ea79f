"""Tools of a request: from the form that the Messages API has to the functions that chat templates expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from minisgl.frontend.anthropic.bodies import ToolChoice
from minisgl.frontend.generation.functions import function_definition
from minisgl.frontend.server.json_body import invalid, missing, truncate, unsupported
from minisgl.wire.text import ToolOptions

OFFERS: Final = ("tool_search_tool", "web_fetch", "web_search")
"""Beginnings of the types of tools that Anthropic's servers run, and without which a request with other tools keeps
its meaning. Tools that a tool search would find are all known to the model here."""

_NOT_HERE: Final = "this server knows no such tool; declare it with `input_schema`, and run it in the client"


class ParsedTools(msgspec.Struct, frozen=True):
    options: ToolOptions | None = None
    """None without any tool that the model may call."""
    fields: tuple[str, ...] = ()
    """Path of the schema of each tool in `options`."""
    ignored: tuple[str, ...] = ()
    """Paths of what is left out."""


def parse_tools(tools: Sequence[dict[str, Any]], choice: ToolChoice | None) -> ParsedTools:
    """Raises ApiError."""
    choice = choice or ToolChoice("auto")
    definitions: dict[str, dict[str, Any]] = {}
    fields: list[str] = []
    ignored: list[str] = []
    for i, tool in enumerate(tools):
        path = f"tools[{i}]"
        kind = tool.get("type")
        if isinstance(kind, str) and kind.startswith(OFFERS):
            ignored.append(path)
            continue
        if kind not in (None, "custom"):
            raise unsupported(f"{path}.type", f"{truncate(str(kind))!r}: {_NOT_HERE}")
        definition = _definition(tool, path)
        name = definition["function"]["name"]
        if name in definitions:
            raise invalid(f"{path}.name", f"another tool is called {name!r}; use unique names")
        definitions[name] = definition
        fields.append(f"{path}.input_schema")
    if ignored and not definitions and choice.type != "none":
        raise unsupported(f"{ignored[0]}.type", _NOT_HERE)
    if choice.type in ("any", "tool") and not definitions:
        raise invalid("tool_choice", "requires `tools`")
    if choice.type == "tool" and choice.name not in definitions:
        raise invalid("tool_choice.name", "no tool has this name; use a name from `tools`")
    if not definitions:
        return ParsedTools(ignored=tuple(ignored))
    kinds: Final = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}
    options = ToolOptions(
        definitions=tuple(definitions.values()),
        choice=kinds[choice.type],  # type: ignore[arg-type]
        name=choice.name or "" if choice.type == "tool" else "",
        parallel=not choice.disable_parallel_tool_use,
    )
    return ParsedTools(options, tuple(fields), tuple(ignored))


def _definition(tool: dict[str, Any], path: str) -> dict[str, Any]:
    if tool.get("input_schema") is None:
        raise missing(f"{path}.input_schema")
    names = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
    function = {ours: tool[theirs] for theirs, ours in names.items() if tool.get(theirs) is not None}
    return function_definition(function, path, parameters="input_schema")
