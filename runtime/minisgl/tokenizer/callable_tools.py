"""Tools that the model may call in an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from minisgl.errors import PromptError
from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.call_rules import CallableTool
from minisgl.wire.text import Generate

_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


def callable_tools(generate: Generate, answers: AnswerFormat) -> Sequence[CallableTool]:
    """Return the tools that an answer may call. Raises PromptError if the format of calls is unknown."""
    options = generate.options.tools
    if options is None or options.choice == "none" or ignores_tools(generate, answers):
        return ()
    if answers.tools is None:
        raise PromptError(
            "tools_unavailable",
            "the format in which this model calls tools is unknown: start the server with --tool-call-parser, or "
            'request tool_choice "none"',
            "tools",
        )
    tools = [_tool(definition) for definition in options.definitions]
    return [tool for tool in tools if options.choice != "named" or tool.name == options.name]


def ignores_tools(generate: Generate, answers: AnswerFormat) -> bool:
    """Return whether a request has tools that the model does not see, and so cannot call."""
    tools = generate.options.tools
    return tools is not None and tools.choice == "auto" and answers.ignores_tools


def _tool(definition: Mapping[str, Any]) -> CallableTool:
    function = definition["function"]
    parameters = function.get("parameters")
    schema = {"type": "object", **parameters} if isinstance(parameters, dict) else _NO_PARAMETERS
    return CallableTool(function["name"], schema, function.get("strict") is True)
