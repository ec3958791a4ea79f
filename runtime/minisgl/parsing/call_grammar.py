"""Grammars of tool calls in each format, as rules of llguidance's variant of Lark.

Calls have the spaces and line breaks that chat templates write, because models were trained on them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from minisgl.grammar import lark
from minisgl.grammar.arguments import lenient_json, strict_json
from minisgl.grammar.errors import GrammarError
from minisgl.parsing import hermes, mistral, qwen_xml
from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.json_call import KEYS
from minisgl.parsing.parameter_types import parameter_types

_MAX_DEFINITIONS: Final = 512 << 10
"""Bytes of the definitions of one tool, where each of its parameters has a schema of its own and may need all."""


class CallableTool(NamedTuple):
    """A tool that an answer may call."""

    name: str
    schema: Mapping[str, Any]
    """JSON schema of its parameters."""
    is_strict: bool
    """Arguments are exactly those that the schema allows; otherwise what cannot be enforced of it is left out."""

    def value(self, schema: Mapping[str, Any]) -> str:
        """Return an expression for a JSON value under this schema. Raises GrammarError for a strict tool."""
        return strict_json(dict(schema)) if self.is_strict else lenient_json(dict(schema))


class CallRules(NamedTuple):
    """Rules for the calls of an answer, at least one. Their names begin with `call`."""

    rules: tuple[str, ...]
    start: str
    """Marker with which the calls begin; empty: none, and they are only calls at the beginning of an answer."""
    first: str
    """Expression for the calls behind that marker."""
    text: str = ""
    """Without a marker: terminal for text that cannot be taken for calls."""


def call_rules(answers: AnswerFormat, tools: Sequence[CallableTool], *, parallel: bool) -> CallRules:
    """Return the rules of calls of these tools; of exactly one call without `parallel`."""
    assert answers.tools is not None and tools
    return _BUILDERS[answers.tools.name](answers, tools, parallel)


def marker(answers: AnswerFormat, text: str) -> str:
    """Return the expression of a marker."""
    token = answers.markers[text].token
    return lark.literal(text) if token is None else lark.special_token(token)


def _hermes(answers: AnswerFormat, tools: Sequence[CallableTool], parallel: bool) -> CallRules:
    start, end = marker(answers, hermes.START), marker(answers, hermes.END)
    bodies = [_json_object(tool, "arguments") for tool in tools]
    rules = (f'call_one: "\\n" {lark.one_of(bodies)} "\\n" {end}',)
    return CallRules(rules, hermes.START, _several("call_one", f'"\\n" {start} call_one', parallel))


def _qwen_xml(answers: AnswerFormat, tools: Sequence[CallableTool], parallel: bool) -> CallRules:
    start, end = marker(answers, qwen_xml.START), marker(answers, qwen_xml.END)
    bodies = [_xml_function(tool) for tool in tools]
    rules = (
        f'call_one: "\\n" {lark.one_of(bodies)} "\\n" {end}',
        "call_text[lazy]: /(?s:.*)\\n<\\/parameter>\\n/",
        "CALL_KEY: /[^<>\\n]+/",
    )
    return CallRules(rules, qwen_xml.START, _several("call_one", f'"\\n" {start} call_one', parallel))


def _llama_json(answers: AnswerFormat, tools: Sequence[CallableTool], parallel: bool) -> CallRules:
    begins = [_json_begin(tool, "parameters") for tool in tools]
    first = [f"CALL_BEGIN_{number} call_{number}" for number in range(len(tools))]
    following = [f'{lark.literal(f"; {begin}")} call_{number}' for number, begin in enumerate(begins)]
    keys = "|".join(KEYS)
    return CallRules(
        (
            *(f'call_{number}: {tool.value(tool.schema)} "}}"' for number, tool in enumerate(tools)),
            *(f"CALL_BEGIN_{number}: {_behind_line_breaks(begin)}" for number, begin in enumerate(begins)),
        ),
        "",
        _several(lark.one_of(first), lark.one_of(following), parallel),
        text=_text_without(rf'\{{[ \t\r\n]*"({keys})"'),
    )


def _pythonic(answers: AnswerFormat, tools: Sequence[CallableTool], parallel: bool) -> CallRules:
    # The bracket belongs to the name: alone, it would be taken for text.
    begins = [_behind_line_breaks(f"[{tool.name}(") for tool in tools]
    first = [f'CALL_BEGIN_{number} call_{number} ")"' for number in range(len(tools))]
    following = [f'{lark.literal(f", {tool.name}(")} call_{number} ")"' for number, tool in enumerate(tools)]
    names = "|".join(re.escape(tool.name) for tool in tools)
    rules = [rule for number, tool in enumerate(tools) for rule in _python_arguments(tool, f"call_{number}")]
    return CallRules(
        (
            *rules,
            *(f"CALL_BEGIN_{number}: {begin}" for number, begin in enumerate(begins)),
            "CALL_KEY: /[A-Za-z_][A-Za-z_0-9]*/",
        ),
        "",
        _several(lark.one_of(first), lark.one_of(following), parallel) + ' "]"',
        text=_text_without(rf"\[[ \t\r\n]*({names})\("),
    )


def _mistral(answers: AnswerFormat, tools: Sequence[CallableTool], parallel: bool) -> CallRules:
    start, arguments = marker(answers, mistral.START), marker(answers, mistral.ARGS)
    if answers.markers[mistral.ARGS].token is not None:
        bodies = [f"{lark.literal(tool.name)} {arguments} {tool.value(tool.schema)}" for tool in tools]
        rules = (f"call_one: {lark.one_of(bodies)}",)
        return CallRules(rules, mistral.START, _several("call_one", f"{start} call_one", parallel))
    bodies = [_json_object(tool, "arguments") for tool in tools]
    rules = (f"call_one: {lark.one_of(bodies)}",)
    return CallRules(rules, mistral.START, '"[" ' + _several("call_one", '", " call_one', parallel) + ' "]"')


def _several(first: str, next_one: str, parallel: bool) -> str:
    return f"{first} ({next_one})*" if parallel else first


def _text_without(call: str) -> str:
    """Return a terminal for text of which no line begins with this pattern of a call."""
    lines = lark.regex(rf"(?s:(.*\n)?[ \t]*{call}.*)")
    return f"{lark.regex('(?s:.+)')} & ~{lines}"


def _behind_line_breaks(begin: str) -> str:
    """Return a terminal for the beginning of a call without a marker. The line breaks that follow reasoning belong to
    it: alone, they would be taken for text."""
    return f"/\\n{{0,4}}/ {lark.literal(begin)}"


def _json_begin(tool: CallableTool, key: str) -> str:
    return f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": '


def _json_object(tool: CallableTool, key: str) -> str:
    return f'({lark.literal(_json_begin(tool, key))} {tool.value(tool.schema)} "}}")'


class _Parameter(NamedTuple):
    name: str
    schema: Mapping[str, Any]
    """With the definitions that it may refer to."""
    is_required: bool


def _parameters(tool: CallableTool) -> list[_Parameter] | None:
    """Return the parameters of a tool in the order of its schema; None if the schema does not list them. Raises
    GrammarError for a strict tool."""
    schema = tool.schema
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return None
    required = schema.get("required")
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    if len(properties) * len(msgspec.json.encode(definitions)) > _MAX_DEFINITIONS:
        if tool.is_strict:
            raise GrammarError("grammar_too_complex", f"{tool.name}: too many parameters with too large definitions")
        # What refers to them may be any value.
        definitions = {}
    return [
        _Parameter(
            name,
            {**value, **definitions} if isinstance(value, Mapping) else {},
            isinstance(required, Sequence) and name in required,
        )
        for name, value in properties.items()
    ]


def _xml_function(tool: CallableTool) -> str:
    parameters = _parameters(tool)
    if parameters is None:
        body = '("<parameter=" CALL_KEY ">\\n" call_text)*'
    else:
        body = " ".join(_xml_parameter(tool, one) for one in parameters)
    begin = lark.literal(f"<function={tool.name}>\n")
    return f'({begin} {body} "</function>")'


def _xml_parameter(tool: CallableTool, parameter: _Parameter) -> str:
    begin = lark.literal(f"<parameter={parameter.name}>\n")
    return f"({begin} {_xml_value(tool, parameter)}){'' if parameter.is_required else '?'}"


def _xml_value(tool: CallableTool, parameter: _Parameter) -> str:
    end = lark.literal("\n</parameter>\n")
    values = parameter.schema.get("enum", [parameter.schema["const"]] if "const" in parameter.schema else None)
    if isinstance(values, list) and values:
        texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
        return f"{lark.one_of([lark.literal(text) for text in texts])} {end}"
    if "string" in parameter_types(tool.schema, parameter.name):
        return "call_text"
    return f"{tool.value(parameter.schema)} {end}"


def _python_arguments(tool: CallableTool, rule: str) -> list[str]:
    """Return the rule for the arguments of a call, and those that it needs, whose names begin with its own."""
    parameters = _parameters(tool)
    if parameters is None:
        anything = lark.json_schema({})
        return [f'{rule}: (CALL_KEY "=" {anything} (", " CALL_KEY "=" {anything})*)?']
    firsts: list[str] = []
    """Arguments from each of those on that may come first."""
    rules: list[str] = []
    may_be_first = True
    for number, one in enumerate(parameters):
        following = f"{rule}_after_{number}"
        rules.append(f"{rule}_{number}: {lark.literal(f'{one.name}=')} {tool.value(one.schema)}")
        if may_be_first:
            firsts.append(f"{rule}_{number} {following}")
        may_be_first = may_be_first and not one.is_required
        rest = ""
        if number + 1 < len(parameters):
            optional = "" if parameters[number + 1].is_required else "?"
            rest = f'(", " {rule}_{number + 1}){optional} {rule}_after_{number + 1}'
        rules.append(f"{following}: {rest or lark.literal('')}")
    if may_be_first:
        firsts.append(lark.literal(""))
    return [f"{rule}: {' | '.join(firsts)}", *rules]


_BUILDERS: Final[Mapping[str, Callable[[AnswerFormat, Sequence[CallableTool], bool], CallRules]]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen_xml,
    "llama3_json": _llama_json,
    "pythonic": _pythonic,
    "mistral": _mistral,
}
