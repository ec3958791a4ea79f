"""Grammars of tool calls in each format, as rules of llguidance's variant of Lark.

Calls have the spaces and line breaks that chat templates write, because models were trained on them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec

from minisgl.errors import GrammarError
from minisgl.grammar import lark
from minisgl.grammar.arguments import lenient_json, strict_json
from minisgl.grammar.schema.refusals import unsupported
from minisgl.parsing import hermes, mistral, pythonic, qwen_xml
from minisgl.parsing.alternatives import json_schema_of
from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.call_arguments import ANYTHING, Arguments, ToolSchema, Value
from minisgl.parsing.json_call import KEYS
from minisgl.parsing.parameter_types import has_type, parameter_types

_LARGE_BYTES: Final = 16 << 10
"""Schemas of tools from which on fewer of them are kept: agents send the same tools with each request."""
_BRACKETS: Final = {"array": r"\[", "object": r"\{"}
"""What values begin with whose type a text can be told from by its first character."""
_XML_END: Final = "\n</parameter>\n"
_UNLISTED: Final = "\n"
"""A name that no parameter can have in Qwen3-Coder's format."""


class CallableTool(NamedTuple):
    """A tool that an answer may call."""

    name: str
    schema: Mapping[str, Any]
    """JSON schema of its parameters."""
    is_strict: bool
    """Arguments are exactly those that the schema allows; otherwise what cannot be enforced of it is left out."""
    needs_all_names: bool = False
    """Refuse parameters whose names the format cannot write, as for a strict tool; otherwise they are left out."""

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


def call_rules(
    answers: AnswerFormat, tools: Sequence[CallableTool], *, parallel: bool, must_call: bool = False
) -> CallRules:
    """Return the rules of calls of these tools; of exactly one call without `parallel`. Raises GrammarError, with
    `must_call` also for a tool of which the format cannot write all parameters."""
    assert answers.tools is not None and tools
    tools = [tool._replace(needs_all_names=tool.is_strict or must_call) for tool in tools]
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
    names = [f"call_{number}" for number in range(len(tools))]
    rules = (
        f'call_one: "\\n" {lark.one_of(names)} "\\n" {end}',
        *(_of_tool(tool, _xml_function, name) for tool, name in zip(tools, names, strict=True)),
        *_xml_texts(),
        # The scanner takes blanks around a name away.
        r"CALL_KEY: /[^<>\s\x00-\x1f]+/",
    )
    return CallRules(rules, qwen_xml.START, _several("call_one", f'"\\n" {start} call_one', parallel))


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
        _several(lark.one_of(first), lark.one_of(following), parallel),
        text=_text_without(rf'\{{[ \t\r\n]*"({keys})"'),
    )


def _pythonic(answers: AnswerFormat, tools: Sequence[CallableTool], parallel: bool) -> CallRules:
    # The bracket belongs to the name: alone, it would be taken for text.
    begins = [_behind_line_breaks(f"[{tool.name}(") for tool in tools]
    first = [f'CALL_BEGIN_{number} call_{number} ")"' for number in range(len(tools))]
    following = [f'{lark.literal(f", {tool.name}(")} call_{number} ")"' for number, tool in enumerate(tools)]
    names = "|".join(re.escape(tool.name) for tool in tools)
    rules = [_of_tool(tool, _python_arguments, f"call_{number}") for number, tool in enumerate(tools)]
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


def _read(tool: CallableTool, can_write: Callable[[str], bool]) -> tuple[ToolSchema | None, list[Arguments]]:
    """Return the schema of a tool and the ways to call it. `can_write`: whether a text can be a parameter's name.
    Raises GrammarError for a strict tool; what cannot be read of another one may be called with any arguments."""
    try:
        schema = ToolSchema(tool.schema, is_strict=tool.is_strict)
        ways = schema.ways()
    except GrammarError:
        if tool.is_strict:
            raise
        return None, [ANYTHING]
    return schema, [_writable(tool, way, can_write) for way in ways]


def _writable(tool: CallableTool, way: Arguments, can_write: Callable[[str], bool]) -> Arguments:
    """Return the arguments without those whose names the format cannot write. Raises GrammarError if it must."""
    lost = next((parameter for parameter in way.parameters if not can_write(parameter.name)), None)
    if lost is not None and tool.needs_all_names:
        raise unsupported(
            lost.value.path,
            f"the model's format of calls cannot write a parameter named {lost.name[:100]!r}; rename it",
        )
    return way._replace(parameters=tuple(one for one in way.parameters if can_write(one.name)))


def _of_tool(tool: CallableTool, build: Callable[[CallableTool, str], str], rule: str = "") -> str:
    """Return what `build` returns, kept by the tool's schema. Raises GrammarError with the tool's name."""
    schema = msgspec.json.encode(tool.schema)
    kept = _small if len(schema) < _LARGE_BYTES else _large
    try:
        return kept(build, rule, schema, tool.name, tool.is_strict, tool.needs_all_names)
    except GrammarError as error:
        raise GrammarError(error.code, f"{tool.name}: {error.message}", error.path) from None


def _built(build: Callable[[CallableTool, str], str], rule: str, schema: bytes, name: str, *flags: bool) -> str:
    return build(CallableTool(name, msgspec.json.decode(schema, type=dict[str, Any]), *flags), rule)


_small: Final = lru_cache(1024)(_built)
_large: Final = lru_cache(64)(_built)


def _xml_function(tool: CallableTool, rule: str) -> str:
    """Return the rule for the function of a call, and those that it needs, whose names begin with its own."""
    schema, ways = _read(tool, qwen_xml.can_be_key)
    names = [f"{rule}_{way}" for way in range(len(ways))]
    rules = [one for name, way in zip(names, ways, strict=True) for one in _xml_way(tool, schema, way, name)]
    begin = lark.literal(f"<function={tool.name}>\n")
    return "\n".join([f"{rule}: {begin} {lark.one_of(names)}", *rules])


def _xml_way(tool: CallableTool, schema: ToolSchema | None, way: Arguments, rule: str) -> list[str]:
    rest = _Rest("", can_end=True)
    rules: list[str] = []
    if way.others is not None:
        rest = _Rest(f"{rule}_others", can_end=True)
        rules.append(f'{rest.rule}: CALL_KEY ">\\n" {_xml_value(tool, schema, _UNLISTED, way.others, rest)}')
    for number, parameter in reversed([*enumerate(way.parameters)]):
        name = lark.literal(f"{parameter.name}>\n")
        value = _xml_value(tool, schema, parameter.name, parameter.value, rest)
        rules.append(f"{rule}_{number}: {name} {value}")
        names = [f"{rule}_{number}"]
        if rest.rule and not parameter.is_required:
            names.append(rest.rule)
        rules.append(f"{rule}_from_{number}: {' | '.join(names)}")
        rest = _Rest(f"{rule}_from_{number}", can_end=rest.can_end and not parameter.is_required)
    return [f"{rule}: {rest.behind('')}", *rules]


class _Rest(NamedTuple):
    """What may follow the end of a value: the next parameter, or the end of the function. A text is over only where one
    of them begins, so their tags are part of its terminal."""

    rule: str
    """Of the next parameter, behind the beginning of its tag; empty: none may follow."""
    can_end: bool

    def behind(self, text: str) -> str:
        """Return an expression for a text and what follows it."""
        return self._one_of(lark.literal(text + qwen_xml.PARAMETER), lark.literal(text + qwen_xml.END_FUNCTION))

    def behind_terminal(self, name: str) -> str:
        """Return an expression for one of the texts of `_xml_texts`, and what follows it."""
        return self._one_of(f"{name}_MORE", f"{name}_LAST")

    def _one_of(self, more: str, last: str) -> str:
        choices = [f"{more} {self.rule}"] if self.rule else []
        return lark.one_of([*choices, last] if self.can_end else choices)


def _xml_value(tool: CallableTool, schema: ToolSchema | None, name: str, value: Value, rest: _Rest) -> str:
    """Return an expression for a value, its end and the rest, whose text the scanner reads as a valid value."""
    if schema is None:
        return rest.behind_terminal("CALL_TEXT")
    types = parameter_types(tool.schema, name)
    if "string" not in types:
        return f"{schema.json(value.schema, value.path)} {rest.behind(_XML_END)}"
    try:
        found = schema.alternatives(value)
    except GrammarError:
        if tool.is_strict:
            raise
        return rest.behind_terminal("CALL_TEXT")
    limited = frozenset[str]()
    """Types of which not all values are valid, so a text may not be read as one of them."""
    choices: list[str] = []
    if any(one.values is None and "string" in one.types for one in found):
        limited = frozenset(kind for kind in types - {"string"} if not any(one.is_open(kind) for one in found))
        if tool.is_strict and not limited <= _BRACKETS.keys():
            kinds = ", ".join(sorted(limited - _BRACKETS.keys()))
            raise unsupported(
                value.path,
                f"in the model's format a string has no quotes, so it may not be beside limited {kinds} values",
            )
        limited &= _BRACKETS.keys()
        choices.append(rest.behind_terminal(_text_beside(limited)))
        found = [one._replace(types=one.types & limited) for one in found]
    for one in found:
        for choice in one.values or ():
            text = choice if isinstance(choice, str) else json.dumps(choice, ensure_ascii=False)
            if has_type(choice, one.types) and qwen_xml.reads_as(text, types, choice):
                # As one terminal: another text may go on with a line break.
                choices.append(rest.behind(text + _XML_END))
    if remaining := [one for one in found if one.values is None and one.types]:
        choices.append(f"{schema.json(json_schema_of(remaining), value.path)} {rest.behind(_XML_END)}")
    if not choices:
        if tool.is_strict:
            raise unsupported(value.path, "the model's format of calls cannot write any valid value")
        return rest.behind_terminal("CALL_TEXT")
    return lark.one_of([*dict.fromkeys(choices)])


def _text_beside(limited: frozenset[str]) -> str:
    """Return the name of the terminals of a text that is not read as one of these types."""
    return "_".join(["CALL_TEXT", *(kind.upper() for kind in sorted(limited))])


def _xml_texts() -> list[str]:
    """Return the terminals of texts with their ends and what follows."""
    rules = [f"CALL_STRING: {qwen_xml.FREE_TEXT}"]
    for kinds in ((), ("array",), ("object",), tuple(_BRACKETS)):
        begins = "".join(_BRACKETS[kind] for kind in kinds)
        # Blanks as the scanner knows them.
        text = rf"(CALL_STRING & ~/[\s\x1c-\x1f]*[{begins}](?s:.*)/)" if kinds else "CALL_STRING"
        name = _text_beside(frozenset(kinds))
        for kind, follows in (("MORE", qwen_xml.PARAMETER), ("LAST", qwen_xml.END_FUNCTION)):
            rules.append(rf'{name}_{kind}: ({text} "\n")? "</parameter>\n{follows}"')
    return rules


def _python_arguments(tool: CallableTool, rule: str) -> str:
    """Return the rule for the arguments of a call, and those that it needs, whose names begin with its own."""
    schema, ways = _read(tool, pythonic.can_be_key)
    names = [f"{rule}_{way}" for way in range(len(ways))]
    rules = [one for name, way in zip(names, ways, strict=True) for one in _python_way(schema, way, name)]
    return "\n".join([f"{rule}: {' | '.join(names)}", *rules])


def _python_way(schema: ToolSchema | None, way: Arguments, rule: str) -> list[str]:
    def json_value(value: Value) -> str:
        return lark.json_schema(True) if schema is None else schema.json(value.schema, value.path)

    arguments = [(f"{lark.literal(f'{one.name}=')} {json_value(one.value)}", one.is_required) for one in way.parameters]
    if way.others is not None:
        other = f'CALL_KEY "=" {rule}_other'
        arguments.append((f'{other} (", " {other})*', False))
    firsts: list[str] = []
    """Arguments from each of those on that may come first."""
    rules = [] if way.others is None else [f"{rule}_other: {json_value(way.others)}"]
    may_be_first = True
    for number, (argument, is_required) in enumerate(arguments):
        following = f"{rule}_after_{number}"
        rules.append(f"{rule}_{number}: {argument}")
        if may_be_first:
            firsts.append(f"{rule}_{number} {following}")
        may_be_first = may_be_first and not is_required
        rest = ""
        if number + 1 < len(arguments):
            optional = "" if arguments[number + 1][1] else "?"
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
