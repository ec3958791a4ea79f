"""Grammars of calls in Gemma 4's format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from minisgl.errors import GrammarError
from minisgl.grammar import lark
from minisgl.grammar.schema.refusals import too_complex, unsupported
from minisgl.parsing import gemma_call
from minisgl.parsing.alternatives import Alternative, json_schema_of
from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.call_arguments import Arguments, ToolSchema, Value
from minisgl.parsing.call_rules import CallableTool, CallRules, in_order, marker, of_tool, read_tool, several
from minisgl.parsing.parameter_types import has_type

_MAX_DEPTH: Final = 8
_MAX_RULES: Final = 2_000
"""Limits of the objects and lists of one tool; what is beyond may have any value, or is refused for a strict tool."""
_SCALARS: Final = frozenset({"integer", "number", "boolean", "null"})
"""Types whose values are written as in JSON."""
_KEY: Final = r"/[A-Za-z_][A-Za-z_0-9.\-]*/"


def gemma_rules(answers: AnswerFormat, tools: Sequence[CallableTool], parallel: bool) -> CallRules:
    """Return the rules of calls of these tools. Raises GrammarError."""
    token = answers.markers[gemma_call.QUOTE].token
    start, end, quote = (marker(answers, text) for text in (gemma_call.START, gemma_call.END, gemma_call.QUOTE))
    build = _Values(quote)
    functions = [of_tool(tool, build, f"call_{number}") for number, tool in enumerate(tools)]
    calls = [
        f'{lark.literal(f"{gemma_call.CALL}{tool.name}{{")} call_{number} "}}"' for number, tool in enumerate(tools)
    ]
    if token is None:
        # Its end is part of the terminal: elsewhere nothing tells where a text is over.
        text = rf"CALL_STRING: {quote} (/(?s:.*)/ & ~/(?s:.*<\|\"\|>.*)/) {quote}"
        string = "call_string: CALL_STRING"
    else:
        text, string = "CALL_STRING: /(?s:.+)/", f"call_string: {quote} CALL_STRING? {quote}"
    return CallRules(
        (
            *functions,
            *(f"call_one: {lark.one_of(calls)} {end}", text, string, f"CALL_KEY: {_KEY}"),
            f"call_scalar: {lark.exact_json({'type': sorted(_SCALARS - {'integer'})})}",
            "call_any: call_string | call_scalar | call_list | call_object",
            'call_list: "[" (call_any ("," call_any)*)? "]"',
            'call_object: "{" (call_pair ("," call_pair)*)? "}"',
            'call_pair: CALL_KEY ":" call_any',
        ),
        gemma_call.START,
        several("call_one", f"{start} call_one", parallel),
    )


@dataclass(frozen=True)
class _Values:
    """Builds the rules for the arguments of a tool."""

    quote: str
    """Expression of the marker around texts."""

    def __call__(self, tool: CallableTool, rule: str) -> str:
        schema, ways = read_tool(tool, gemma_call.can_be_key)
        rules: list[str] = []
        if schema is None:
            return f'{rule}: (call_pair ("," call_pair)*)?'
        rules.append(f"{rule}: {_Tool(self.quote, tool, schema, rules).ways(ways, rule, 0)}")
        return "\n".join(rules)


@dataclass(frozen=True)
class _Tool:
    quote: str
    tool: CallableTool
    schema: ToolSchema
    rules: list[str]
    """Those so far."""

    def ways(self, ways: Sequence[Arguments], rule: str, depth: int) -> str:
        """Return an expression for the parameters of an object."""
        names = [f"{rule}_{number}" for number in range(len(ways))]
        for way, name in zip(ways, names, strict=True):
            # Chat templates write them in this order.
            parameters = sorted(way.parameters, key=lambda one: (one.name.lower(), one.name))
            arguments = [
                (f"{lark.literal(f'{one.name}:')} {self.value(one.value, f'{name}_{number}v', depth)}", one.is_required)
                for number, one in enumerate(parameters)
            ]
            if way.others is not None:
                other = f'CALL_KEY ":" {self.value(way.others, f"{name}_o", depth)}'
                arguments.append((f'{other} ("," {other})*', False))
            self.rules.extend(in_order(name, arguments, ","))
        return lark.one_of(names)

    def value(self, value: Value, rule: str, depth: int) -> str:
        """Return an expression for a value. Raises GrammarError for a strict tool."""
        try:
            if depth > _MAX_DEPTH or len(self.rules) > _MAX_RULES:
                raise too_complex(value.path, "its objects and lists are nested too deeply, or too many")
            found = self.schema.alternatives(value)
            choices = [choice for n, one in enumerate(found) for choice in self._of(one, value, f"{rule}{n}", depth)]
        except GrammarError:
            if self.tool.is_strict:
                raise
            return "call_any"
        if not choices:
            if self.tool.is_strict:
                raise unsupported(value.path, "the model's format of calls cannot write any valid value")
            return "call_any"
        return lark.one_of([*dict.fromkeys(choices)])

    def _of(self, one: Alternative, value: Value, rule: str, depth: int) -> list[str]:
        if one.values is not None:
            return [self._literal(choice) for choice in one.values if has_type(choice, one.types)]
        choices: list[str] = []
        if "string" in one.types:
            choices.append("call_string")
        if scalars := one.types & _SCALARS:
            schema = json_schema_of([one._replace(types=scalars)])
            choices.append(self.schema.json(schema, value.path))
        if "array" in one.types:
            choices.append("call_list" if one.is_open("array") else self._list(one, rule, depth))
        if "object" in one.types:
            choices.append("call_object" if one.is_open("object") else self._object(one, rule, depth))
        return choices

    def _list(self, one: Alternative, rule: str, depth: int) -> str:
        parts = [part for part in one.parts if "items" in part.schema]
        limits = {"prefixItems", "minItems", "maxItems", "uniqueItems"}
        if self.tool.is_strict:
            for part in one.parts:
                if found := sorted(limits & part.schema.keys()):
                    raise unsupported((*part.path, found[0]), "the model's format of calls cannot limit a list so")
            if len(parts) > 1:
                raise unsupported(parts[1].path, "the model's format of calls takes one schema of items")
        if not parts:
            return "call_list"
        items = Value(parts[0].schema["items"], (*parts[0].path, "items"))
        self.rules.append(f"{rule}i: {self.value(items, f'{rule}iv', depth + 1)}")
        return f'"[" ({rule}i ("," {rule}i)*)? "]"'

    def _object(self, one: Alternative, rule: str, depth: int) -> str:
        way = self.schema.arguments(one)
        if way is None:
            raise unsupported(one.parts[0].path, "no value is valid")
        way = way._replace(parameters=tuple(p for p in way.parameters if gemma_call.can_be_key(p.name)))
        return f'"{{" {self.ways([way], f"{rule}p", depth + 1)} "}}"'

    def _literal(self, value: Any) -> str:
        """Return an expression for one value."""
        match value:
            case "":
                return f"{self.quote} {self.quote}"
            case str():
                return f"{self.quote} {lark.literal(value)} {self.quote}"
            case list():
                return " ".join(('"["', *_separated([self._literal(one) for one in value]), '"]"'))
            case dict():
                pairs = [f"{lark.literal(f'{key}:')} {self._literal(one)}" for key, one in sorted(value.items())]
                return " ".join(('"{"', *_separated(pairs), '"}"'))
        return lark.literal(json.dumps(value))


def _separated(expressions: list[str]) -> list[str]:
    return [one for expression in expressions for one in ('","', expression)][1:]
