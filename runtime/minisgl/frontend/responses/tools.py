"""Tools of a request: from the forms that the Responses API has to the functions that chat templates expect, and back.

A model knows functions only. A custom tool becomes a function with one text argument, a tool of a namespace one whose
name begins with that of the namespace. `ToolNames` finds the tool that a call of the model is for.

Tools that OpenAI's servers run do not exist here. Those that agents send with every request as an offer are left out
beside tools that can be called, and a header of the response names them; all others are errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from minisgl.frontend.generation.functions import MAX_FUNCTIONS, check_name, function_definition
from minisgl.frontend.responses.custom_input import ARGUMENT
from minisgl.frontend.server.json_body import invalid, missing, truncate, unsupported
from minisgl.wire.text import ToolOptions

OFFERS: Final = ("image_generation", "tool_search", "web_search", "web_search_preview")
"""Tools of OpenAI's servers without which a request with other tools keeps its meaning. `tool_search` finds tools that
a model does not see yet; here it sees all of them."""

_SEPARATOR: Final = "__"
_NOT_HERE: Final = "this server runs no tools; declare a function, and run it in the client"

_Choice = Literal["none", "auto", "required", "named"]


class ToolName(msgspec.Struct, frozen=True):
    """A tool as the client calls it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class ToolNames(msgspec.Struct, frozen=True):
    """Tools by the name of the function that they are to the model."""

    by_function: Mapping[str, ToolName] = {}

    def find(self, function: str) -> ToolName:
        """Return the tool of a call; a name that no tool has, which a model may make up, stays as it is."""
        return self.by_function.get(function) or ToolName(function)


class ParsedTools(msgspec.Struct, frozen=True):
    options: ToolOptions | None = None
    """None without any tool that the model may call."""
    fields: tuple[str, ...] = ()
    """Path of the parameters of each tool in `options`."""
    names: ToolNames = ToolNames()
    ignored: tuple[str, ...] = ()
    """Paths of what is left out."""


class _Tool(msgspec.Struct, frozen=True):
    definition: dict[str, Any]
    name: ToolName
    path: str
    ignored: tuple[str, ...] = ()

    @property
    def function(self) -> str:
        return function_name(self.name.name, self.name.namespace)

    @property
    def field(self) -> str:
        """Path of the field that says what the tool accepts."""
        return f"{self.path}.{'format' if self.name.is_custom else 'parameters'}"


def function_name(name: str, namespace: str | None) -> str:
    """Return the name of the function that a tool is to the model."""
    if not namespace:
        return name
    return namespace + ("" if namespace.endswith(_SEPARATOR) else _SEPARATOR) + name


def parse_tools(tools: Sequence[dict[str, Any]], choice: Any, parallel: bool | None) -> ParsedTools:
    """Raises ApiError."""
    offers = tuple(f"tools[{i}]" for i, tool in enumerate(tools) if tool.get("type") in OFFERS)
    found = [tool for i, item in enumerate(tools) for tool in _tools(item, f"tools[{i}]")]
    if offers and not found and choice != "none":
        raise unsupported(f"{offers[0]}.type", _NOT_HERE)
    if len(found) > MAX_FUNCTIONS:
        raise invalid("tools", f"expected at most {MAX_FUNCTIONS} tools, those of namespaces included")
    by_function: dict[str, ToolName] = {}
    for tool in found:
        if tool.function in by_function:
            raise invalid(f"{tool.path}.name", f"another tool is called {tool.function!r}; use unique names")
        by_function[tool.function] = tool.name
    kind, name, allowed = _choice(choice, by_function)
    ignored = (*offers, *(path for tool in found for path in tool.ignored))
    if not found:
        return ParsedTools(ignored=ignored)
    usable = [tool for tool in found if allowed is None or tool.function in allowed]
    options = ToolOptions(
        definitions=tuple(tool.definition for tool in usable),
        choice=kind,
        name=name,
        parallel=parallel is not False,
    )
    return ParsedTools(options, tuple(tool.field for tool in usable), ToolNames(by_function), ignored)


def _tools(item: dict[str, Any], path: str) -> Iterator[_Tool]:
    match item.get("type"):
        case "function" | "custom":
            yield _tool(item, path, None)
        case "namespace":
            yield from _namespace(item, path)
        case None:
            raise missing(f"{path}.type")
        case kind if kind not in OFFERS:
            raise unsupported(f"{path}.type", f"{truncate(str(kind))!r}: {_NOT_HERE}")


def _namespace(item: dict[str, Any], path: str) -> Iterator[_Tool]:
    namespace, tools, description = item.get("name"), item.get("tools"), item.get("description")
    if not isinstance(namespace, str) or not namespace:
        raise invalid(f"{path}.name", "expected the name of the namespace")
    # Without tools, too, whose names begin with it.
    check_name(namespace, path)
    if not isinstance(tools, list):
        raise invalid(f"{path}.tools", "expected a list of tools")
    if not isinstance(description, str | None):
        raise invalid(f"{path}.description", "expected a string")
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") not in ("function", "custom"):
            raise invalid(f"{path}.tools[{i}].type", 'expected a tool of the type "function" or "custom"')
        own = tool.get("description")
        if not i and description and isinstance(own, str | None):
            # The model sees no namespaces, so what is said about all its tools comes before the first of them.
            own = f"{description}\n\n{own or ''}".rstrip()
        yield _tool({**tool, "description": own}, f"{path}.tools[{i}]", namespace)


def _tool(item: dict[str, Any], path: str, namespace: str | None) -> _Tool:
    name = item.get("name")
    if name is None:
        raise missing(f"{path}.name")
    if not isinstance(name, str):
        raise invalid(f"{path}.name", "expected a string")
    is_custom = item["type"] == "custom"
    function, ignored = _custom(item, path) if is_custom else (_function(item), ())
    definition = function_definition({**function, "name": function_name(name, namespace)}, path)
    return _Tool(definition, ToolName(name, namespace, is_custom), path, ignored)


def _function(item: dict[str, Any]) -> dict[str, Any]:
    return {field: item[field] for field in ("description", "parameters", "strict") if item.get(field) is not None}


def _custom(item: dict[str, Any], path: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the function for a custom tool, and the paths of what is not enforced."""
    argument: dict[str, Any] = {"type": "string", "description": "The input as plain text."}
    function: dict[str, Any] = {"description": "" if item.get("description") is None else item["description"]}
    ignored: tuple[str, ...] = ()
    match item.get("format"):
        case None | {"type": "text"}:
            pass
        case {"type": "grammar", "syntax": "regex", "definition": str(pattern)}:
            argument["pattern"] = f"^(?:{pattern})$"
            function["strict"] = True
        case {"type": "grammar", "syntax": "lark", "definition": str(grammar)}:
            # No grammar of ours describes the escaped form that the text has within JSON.
            argument["description"] += " It must match this Lark grammar:\n" + grammar
            ignored = (f"{path}.format",)
        case _:
            problem = 'expected {"type": "text"}, or {"type": "grammar", "syntax": "lark" or "regex", "definition": …}'
            raise invalid(f"{path}.format", problem)
    function["parameters"] = {
        "type": "object",
        "properties": {ARGUMENT: argument},
        "required": [ARGUMENT],
        "additionalProperties": False,
    }
    return function, ignored


def _choice(choice: Any, tools: Mapping[str, ToolName]) -> tuple[_Choice, str, frozenset[str] | None]:
    """Return the choice, the function's name for a named one, and the only functions that may be called, if it has a
    list of them."""
    match choice:
        case None:
            return "auto", "", None
        case "none" | "auto":
            return choice, "", None
        case "required":
            if not tools:
                raise invalid("tool_choice", "requires `tools`")
            return "required", "", None
        case {"type": "function" | "custom"}:
            return "named", _chosen(choice, tools, "tool_choice"), None
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [_, *_] as allowed}:
            paths = ((item, f"tool_choice.tools[{i}]") for i, item in enumerate(allowed))
            names = frozenset(_chosen(item, tools, path) for item, path in paths)
            return mode, "", names
        case {"type": str(kind)} if kind != "allowed_tools":
            raise unsupported("tool_choice.type", f"{truncate(kind)!r}: {_NOT_HERE}")
    problem = 'expected "none", "auto", "required", {"type": "function", "name": …} or {"type": "allowed_tools", …}'
    raise invalid("tool_choice", problem)


def _chosen(choice: Any, tools: Mapping[str, ToolName], path: str) -> str:
    """Return the name of the function that `choice` names."""
    match choice:
        case {"type": "function" | "custom" as kind, "name": str(name)}:
            namespace = choice.get("namespace")
            function = function_name(name, namespace if isinstance(namespace, str) else None)
            if function in tools and tools[function].is_custom == (kind == "custom"):
                return function
            raise invalid(f"{path}.name", f"no {kind} tool is called {truncate(name)!r}; use a name from `tools`")
    raise invalid(path, 'expected {"type": "function", "name": …} or {"type": "custom", "name": …}')
