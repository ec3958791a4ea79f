"""What the grammars of tool calls in all formats have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec

from minisgl.errors import GrammarError
from minisgl.grammar import lark
from minisgl.grammar.arguments import lenient_json, strict_json
from minisgl.grammar.schema.refusals import unsupported
from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.call_arguments import ANYTHING, Arguments, ToolSchema

_LARGE_BYTES: Final = 16 << 10
"""Schemas of tools from which on fewer of them are kept: agents send the same tools with each request."""


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


def marker(answers: AnswerFormat, text: str) -> str:
    """Return the expression of a marker."""
    token = answers.markers[text].token
    return lark.literal(text) if token is None else lark.special_token(token)


def several(first: str, next_one: str, parallel: bool) -> str:
    return f"{first} ({next_one})*" if parallel else first


def read_tool(tool: CallableTool, can_write: Callable[[str], bool]) -> tuple[ToolSchema | None, list[Arguments]]:
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


def of_tool(tool: CallableTool, build: Callable[[CallableTool, str], str], rule: str = "") -> str:
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


def in_order(rule: str, arguments: Sequence[tuple[str, bool]], separator: str) -> list[str]:
    """Return a rule for arguments that are separated by a text, and those that it needs, whose names begin with its
    own. `arguments`: the expression of each, in their order, and whether it is required."""
    between = lark.literal(separator)
    firsts: list[str] = []
    """Arguments from each of those on that may come first."""
    rules: list[str] = []
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
            rest = f"({between} {rule}_{number + 1}){optional} {rule}_after_{number + 1}"
        rules.append(f"{following}: {rest or lark.literal('')}")
    if may_be_first:
        firsts.append(lark.literal(""))
    return [f"{rule}: {' | '.join(firsts)}", *rules]
