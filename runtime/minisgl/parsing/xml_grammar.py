"""Grammars of calls in tags, in the syntax of each family."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from minisgl.errors import GrammarError
from minisgl.grammar import lark
from minisgl.grammar.schema.refusals import unsupported
from minisgl.parsing import xml_call
from minisgl.parsing.alternatives import json_schema_of
from minisgl.parsing.answer_format import AnswerFormat
from minisgl.parsing.call_arguments import Arguments, ToolSchema, Value
from minisgl.parsing.call_rules import CallableTool, CallRules, marker, of_tool, read_tool, several
from minisgl.parsing.parameter_types import has_type, parameter_types
from minisgl.parsing.xml_call import XmlSyntax

_BRACKETS: Final[Mapping[str, str]] = {"array": r"\[", "object": r"\{"}
"""What values begin with whose type a text can be told from by its first character."""
_UNLISTED: Final = "\n"
"""A name that no parameter can have."""


def xml_rules(syntax: XmlSyntax, answers: AnswerFormat, tools: Sequence[CallableTool], parallel: bool) -> CallRules:
    """Return the rules of calls of these tools. Raises GrammarError."""
    tokens = {text: one.token for text, one in answers.markers.items() if one.token is not None}
    tags = _Tags(syntax, tuple(sorted(tokens.items())))
    names = [f"call_{number}" for number in range(len(tools))]
    functions = [of_tool(tool, tags, name) for tool, name in zip(tools, names, strict=True)]
    begin, between = lark.literal(syntax.behind_start), lark.literal(syntax.between)
    one = lark.one_of(names)
    end = f"{lark.literal(syntax.behind_function)} {marker(answers, syntax.end)}" if syntax.end_function else ""
    if syntax.has_shared_markers:
        rule = f"call_one: {one}"
        calls = f"{begin} {several('call_one', f'{between} call_one', parallel)} {end}"
    else:
        rule = f"call_one: {begin} {one} {end}"
        calls = several("call_one", f"{between} {marker(answers, syntax.start)} call_one", parallel)
    return CallRules((rule, *functions, *tags.terminals()), syntax.start, calls)


@dataclass(frozen=True)
class _Tags:
    """Grammar of functions between tags. `__call__` builds that of one tool."""

    syntax: XmlSyntax
    tokens: tuple[tuple[str, int], ...]
    """Markers that are tokens."""

    def __call__(self, tool: CallableTool, rule: str) -> str:
        """Return the rule for the function of a call, and those that it needs, whose names begin with its own."""
        syntax = self.syntax
        schema, ways = read_tool(tool, lambda name: xml_call.can_be_key(syntax, name))
        names = [f"{rule}_{way}" for way in range(len(ways))]
        rules = [one for name, way in zip(names, ways, strict=True) for one in self._way(tool, schema, way, name)]
        begin = lark.literal(f"{syntax.name[0]}{tool.name}{syntax.name[1]}{syntax.behind_name}")
        return "\n".join([f"{rule}: {begin} {lark.one_of(names)}", *rules])

    def _way(self, tool: CallableTool, schema: ToolSchema | None, way: Arguments, rule: str) -> list[str]:
        syntax = self.syntax
        behind_key = (syntax.key[1], syntax.behind_key, syntax.value[0], syntax.around_value)
        rest = _Rest(self, "", can_end=True)
        rules: list[str] = []
        if way.others is not None:
            rest = _Rest(self, f"{rule}_others", can_end=True)
            value = _value(syntax, tool, schema, _UNLISTED, way.others, rest)
            rules.append(f"{rest.rule}: CALL_KEY {self.texts(*behind_key)} {value}")
        for number, parameter in reversed([*enumerate(way.parameters)]):
            name = self.texts(parameter.name, *behind_key)
            value = _value(syntax, tool, schema, parameter.name, parameter.value, rest)
            rules.append(f"{rule}_{number}: {name} {value}")
            names = [f"{rule}_{number}"]
            if rest.rule and not parameter.is_required:
                names.append(rest.rule)
            rules.append(f"{rule}_from_{number}: {' | '.join(names)}")
            rest = _Rest(self, f"{rule}_from_{number}", can_end=rest.can_end and not parameter.is_required)
        return [f"{rule}: {rest.at_tag()}", *rules]

    def texts(self, *texts: str) -> str:
        """Return an expression for texts that follow each other, those that are tokens as such."""
        tokens = dict(self.tokens)
        pieces: list[str] = []
        literal = ""
        for text in texts:
            if text in tokens:
                pieces += [*([lark.literal(literal)] if literal else []), lark.special_token(tokens[text])]
                literal = ""
            else:
                literal += text
        if literal or not pieces:
            pieces.append(lark.literal(literal))
        return " ".join(pieces)

    def ends(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Return the two ends of a value by name: what stands behind it, up to the next parameter and to the end."""
        end = (self.syntax.value[1], self.syntax.behind_value)
        return ("MORE", (*end, self.syntax.key[0])), ("LAST", (*end, self.syntax.closing))

    def split(self, end: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
        """Return the text of an end up to its first token, and the rest."""
        tokens = dict(self.tokens)
        before = [*itertools.takewhile(lambda text: text not in tokens, end)]
        return "".join(before), end[len(before) :]

    def terminals(self) -> list[str]:
        """Return the terminals of texts. They contain their ends, and what follows, as far as these are no tokens:
        elsewhere nothing tells where a text is over."""
        is_token = self.syntax.value[1] in dict(self.tokens)
        # The scanner takes blanks around a name away.
        excluded = '"' if self.syntax.key[1].startswith('"') else ""
        rules = [rf"CALL_KEY: /[^<>{excluded}\s\x00-\x1f]+/"]
        rules.append(f"CALL_STRING: {'/(?s:.+)/' if is_token else self.syntax.free_text}")
        for kinds in ((), ("array",), ("object",), tuple(_BRACKETS)):
            begins = "".join(_BRACKETS[kind] for kind in kinds)
            # Blanks as the scanner knows them.
            text = rf"(CALL_STRING & ~/[\s\x1c-\x1f]*[{begins}](?s:.*)/)" if kinds else "CALL_STRING"
            name = _text_beside(frozenset(kinds))
            if is_token:
                rules.append(f"{name}: {text}")
                continue
            if around := self.syntax.around_value:
                text = f"({text} {lark.literal(around)})?"
            for kind, end in self.ends():
                rules.append(f"{name}_{kind}: {text} {lark.literal(self.split(end)[0])}")
        return rules


class _Rest(NamedTuple):
    """What may follow the end of a value: the next parameter, or the end of the function. A text is over only where one
    of them begins, so their tags are part of its terminal."""

    tags: _Tags
    rule: str
    """Of the next parameter, behind the beginning of its tag; empty: none may follow."""
    can_end: bool

    def at_tag(self) -> str:
        """Return an expression for the next parameter with its tag, or the end of the function."""
        syntax = self.tags.syntax
        return self._one_of(self.tags.texts(syntax.key[0]), self.tags.texts(syntax.closing))

    def behind(self, text: str = "") -> str:
        """Return an expression for a text, the end of a value, and what follows it."""
        before = text + self.tags.syntax.around_value
        return self._one_of(*(self.tags.texts(*([before] if before else []), *end) for _, end in self.tags.ends()))

    def behind_text(self, name: str) -> str:
        """Return an expression for one of the texts of `terminals`, its end and what follows it."""
        expressions: list[str] = []
        for kind, end in self.tags.ends():
            before, rest = self.tags.split(end)
            text = f"{name}_{kind}" if before else f"{name}?"
            expressions.append(" ".join([text, *([self.tags.texts(*rest)] if rest else [])]))
        return self._one_of(*expressions)

    def _one_of(self, more: str, last: str) -> str:
        choices = [f"{more} {self.rule}"] if self.rule else []
        return lark.one_of([*choices, last] if self.can_end else choices)


def _value(
    syntax: XmlSyntax, tool: CallableTool, schema: ToolSchema | None, name: str, value: Value, rest: _Rest
) -> str:
    """Return an expression for a value, its end and the rest, whose text the scanner reads as a valid value."""
    if schema is None:
        return rest.behind_text("CALL_TEXT")
    types = parameter_types(tool.schema, name)
    if "string" not in types:
        return f"{schema.json(value.schema, value.path)} {rest.behind()}"
    try:
        found = schema.alternatives(value)
    except GrammarError:
        if tool.is_strict:
            raise
        return rest.behind_text("CALL_TEXT")
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
        choices.append(rest.behind_text(_text_beside(limited)))
        found = [one._replace(types=one.types & limited) for one in found]
    for one in found:
        for choice in one.values or ():
            text = choice if isinstance(choice, str) else json.dumps(choice, ensure_ascii=False)
            if has_type(choice, one.types) and xml_call.reads_as(syntax, text, types, choice):
                # As one terminal: another text may go on with a line break.
                choices.append(rest.behind(text))
    if remaining := [one for one in found if one.values is None and one.types]:
        choices.append(f"{schema.json(json_schema_of(remaining), value.path)} {rest.behind()}")
    if not choices:
        if tool.is_strict:
            raise unsupported(value.path, "the model's format of calls cannot write any valid value")
        return rest.behind_text("CALL_TEXT")
    return lark.one_of([*dict.fromkeys(choices)])


def _text_beside(limited: frozenset[str]) -> str:
    """Return the name of the terminals of a text that is not read as one of these types."""
    return "_".join(["CALL_TEXT", *(kind.upper() for kind in sorted(limited))])
