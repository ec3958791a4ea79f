"""Grammars of tool calls in each format, as rules of llguidance's variant of Lark.

Calls have the spaces and line breaks that chat templates write, because models were trained on them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, TypeAlias

from minisgl.grammar import lark
from minisgl.parsing import hunyuan, marked_json, mistral, pythonic, xml_call
from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.call_arguments import Arguments, ToolSchema, Value
from minisgl.parsing.call_rules import CallableTool, CallRules, in_order, marker, of_tool, read_tool, several
from minisgl.parsing.gemma_grammar import gemma_rules
from minisgl.parsing.json_call import KEYS
from minisgl.parsing.marked_json import JsonSyntax
from minisgl.parsing.xml_grammar import xml_rules


def call_rules(
    answers: AnswerFormat, tools: Sequence[CallableTool], *, parallel: bool, must_call: bool = False
) -> CallRules:
    """Return the rules of calls of these tools; of exactly one call without `parallel`. Raises GrammarError, with
    `must_call` also for a tool of which the format cannot write all parameters."""
    assert answers.tools is not None and tools
    tools = [tool._replace(needs_all_names=tool.is_strict or must_call) for tool in tools]
    return _BUILDERS[answers.tools.name](answers, tools, parallel)


def _marked_json(syntax: JsonSyntax, answers: AnswerFormat, tools: Sequence[CallableTool], parallel: bool) -> CallRules:
    start, around, between = marker(answers, syntax.start), lark.literal(syntax.around), lark.literal(syntax.between)
    end = f"{around} {marker(answers, syntax.end)}" if syntax.end else ""
    body = lark.one_of([_json_object(tool, "arguments") for tool in tools])
    if syntax.is_list:
        calls = several("call_one", '", " call_one', parallel)
        return CallRules((f"call_one: {body}",), syntax.start, f'{around} "[" {calls} "]" {end}')
    rules = (f"call_one: {around} {body} {end}",)
    return CallRules(rules, syntax.start, several("call_one", f"{between} {start} call_one", parallel))


def _llama_json(answers: AnswerFormat, tools: Sequence[CallableTool], parallel: bool) -> CallRules:
    begins = [_json_begin(tool, "parameters") for tool in tools]
    first = [f"CALL_BEGIN_{number} call_{number}" for number in range(len(tools))]
    following = [f"{lark.literal(f'; {begin}')} call_{number}" for number, begin in enumerate(begins)]
    keys = "|".join(KEYS)
    return CallRules(
        (
            *(f'call_{number}: {tool.value(tool.schema)} "}}"' for number, tool in enumerate(tools)),
            *(f"CALL_BEGIN_{number}: {_behind_line_breaks(begin)}" for number, begin in enumerate(begins)),
        ),
        "",
        several(lark.one_of(first), lark.one_of(following), parallel),
        text=_text_without(rf'\{{[ \t\r\n]*"({keys})"'),
    )


def _pythonic(answers: AnswerFormat, tools: Sequence[CallableTool], parallel: bool) -> CallRules:
    # The bracket belongs to the name: alone, it would be taken for text.
    begins = [_behind_line_breaks(f"[{tool.name}(") for tool in tools]
    first = [f'CALL_BEGIN_{number} call_{number} ")"' for number in range(len(tools))]
    following = [f'{lark.literal(f", {tool.name}(")} call_{number} ")"' for number, tool in enumerate(tools)]
    names = "|".join(re.escape(tool.name) for tool in tools)
    rules = [of_tool(tool, _python_arguments, f"call_{number}") for number, tool in enumerate(tools)]
    return CallRules(
        (
            *rules,
            *(f"CALL_BEGIN_{number}: {begin}" for number, begin in enumerate(begins)),
            "CALL_KEY: /[A-Za-z_][A-Za-z_0-9]*/",
        ),
        "",
        several(lark.one_of(first), lark.one_of(following), parallel) + ' "]"',
        text=_text_without(rf"\[[ \t\r\n]*({names})\("),
    )


def _pythonic_marked(answers: AnswerFormat, tools: Sequence[CallableTool], parallel: bool) -> CallRules:
    rules = _python_rules(tools)
    calls = several("call_one", '", " call_one', parallel)
    return CallRules(rules, pythonic.LIST_START, f'"[" {calls} "]" {marker(answers, pythonic.LIST_END)}')


def _pythonic_lines(answers: AnswerFormat, tools: Sequence[CallableTool], parallel: bool) -> CallRules:
    lines = several("call_one", '"\\n" call_one', parallel)
    return CallRules(_python_rules(tools), pythonic.START, f'"\\n" {lines} "\\n" {marker(answers, pythonic.END)}')


def _python_rules(tools: Sequence[CallableTool]) -> tuple[str, ...]:
    """Return the rules of `call_one`, a call of any of these tools."""
    calls = [f'{lark.literal(f"{tool.name}(")} call_{number} ")"' for number, tool in enumerate(tools)]
    rules = [of_tool(tool, _python_arguments, f"call_{number}") for number, tool in enumerate(tools)]
    return (*rules, f"call_one: {lark.one_of(calls)}", "CALL_KEY: /[A-Za-z_][A-Za-z_0-9]*/")


def _mistral(answers: AnswerFormat, tools: Sequence[CallableTool], parallel: bool) -> CallRules:
    start, arguments = marker(answers, mistral.START), marker(answers, mistral.ARGS)
    if answers.markers[mistral.ARGS].token is not None:
        # Some models have learned to write an identifier, too.
        has_id = answers.markers[mistral.CALL_ID].token is not None
        identifier = f"({marker(answers, mistral.CALL_ID)} /[A-Za-z0-9]{{9}}/)? " if has_id else ""
        bodies = [f"{lark.literal(tool.name)} {identifier}{arguments} {tool.value(tool.schema)}" for tool in tools]
        rules = (f"call_one: {lark.one_of(bodies)}",)
        return CallRules(rules, mistral.START, several("call_one", f"{start} call_one", parallel))
    bodies = [_json_object(tool, "arguments") for tool in tools]
    rules = (f"call_one: {lark.one_of(bodies)}",)
    return CallRules(rules, mistral.START, '"[" ' + several("call_one", '", " call_one', parallel) + ' "]"')


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


def _python_arguments(tool: CallableTool, rule: str) -> str:
    """Return the rule for the arguments of a call, and those that it needs, whose names begin with its own."""
    schema, ways = read_tool(tool, pythonic.can_be_key)
    names = [f"{rule}_{way}" for way in range(len(ways))]
    rules = [one for name, way in zip(names, ways, strict=True) for one in _python_way(schema, way, name)]
    return "\n".join([f"{rule}: {' | '.join(names)}", *rules])


def _python_way(schema: ToolSchema | None, way: Arguments, rule: str) -> list[str]:
    def json_value(value: Value) -> str:
        return lark.json_schema(True) if schema is None else schema.json(value.schema, value.path)

    rules: list[str] = []
    arguments = [(f"{lark.literal(f'{one.name}=')} {json_value(one.value)}", one.is_required) for one in way.parameters]
    if way.others is not None:
        other = f'CALL_KEY "=" {rule}_other'
        arguments.append((f'{other} (", " {other})*', False))
        rules.append(f"{rule}_other: {json_value(way.others)}")
    return [*in_order(rule, arguments, ", "), *rules]


def _hunyuan(answers: AnswerFormat, tools: Sequence[CallableTool], parallel: bool) -> CallRules:
    call, end_call = marker(answers, hunyuan.CALL), marker(answers, hunyuan.END_CALL)
    bodies = [f"{lark.literal(f'{tool.name}{hunyuan.OPEN}')} {tool.value(tool.schema)}" for tool in tools]
    rules = (f"call_one: {call} {lark.one_of(bodies)} {lark.literal(hunyuan.CLOSE)} {end_call}",)
    calls = several("call_one", '"\\n" call_one', parallel)
    return CallRules(rules, hunyuan.START, f'"\\n" {calls} "\\n" {marker(answers, hunyuan.END)}')


def _hunyuan_list(answers: AnswerFormat, tools: Sequence[CallableTool], parallel: bool) -> CallRules:
    rules = (f"call_one: {lark.one_of([_json_object(tool, 'arguments') for tool in tools])}",)
    calls = several("call_one", '", " call_one', parallel)
    return CallRules(rules, hunyuan.START, f'"[" {calls} "]" {marker(answers, hunyuan.END)}')


_Builder: TypeAlias = Callable[[AnswerFormat, Sequence[CallableTool], bool], CallRules]
_BUILDERS: Final[Mapping[str, _Builder]] = {
    **{name: partial(_marked_json, syntax) for name, syntax in marked_json.SYNTAXES.items()},
    **{name: partial(xml_rules, syntax) for name, syntax in xml_call.SYNTAXES.items()},
    "llama3_json": _llama_json,
    "pythonic": _pythonic,
    "lfm2": _pythonic_marked,
    "olmo3": _pythonic_lines,
    "hunyuan": _hunyuan,
    "hunyuan_a13b": _hunyuan_list,
    "gemma4": gemma_rules,
    "mistral": _mistral,
}
