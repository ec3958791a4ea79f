"""Search for parts of a user's Lark grammar that match nothing, behind others that match something.

The library does not look for them: an answer that comes to one can neither go on nor end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from minisgl.grammar import lark
from minisgl.grammar.library import matches_nothing

_MAX_CHECKS: Final = 64
"""Terminals and regular expressions that the library checks, at up to a millisecond each."""
_MAX_TERMINALS: Final = 16 << 10
"""Characters of all terminals, up to which those that are intersections are checked."""
_MAX_DEPTH: Final = 100
_MAX_ROUNDS: Final = 64

_TOKEN: Final = re.compile(
    r'(?P<blank>[ \t\r\n]+|//[^\n]*|#[^\n]*)|(?P<text>"(?:[^"\\\n]|\\.)*"i?)|(?P<regex>/(?:[^/\\\n]|\\.)+/[imslux]*)'
    r"|(?P<special><[^<>\s]*>)|(?P<name>@?[A-Za-z_]\w*)|(?P<repetition>[*+?]|\{\d*,?\d*\})|(?P<sign>\.\.|[()|&~\[\]])"
)
_HEAD: Final = re.compile(r"^[?!]?(?P<name>[A-Za-z_]\w*)(?:\[[^\]\n]*\])?[ \t]*:(?!:)", re.MULTILINE)
_DIRECTIVE: Final = re.compile(r"^%[^\n]*$", re.MULTILINE)
_CAN_BE_EMPTY: Final = re.compile(r"\[\^|&&|--|~~|\\P|[$^]")
"""In every regular expression that matches nothing."""


class _Item(NamedTuple):
    """A symbol: the name of a rule or terminal, a regular expression, or a group; otherwise something that matches."""

    text: str = ""
    group: list[list[_Item]] | None = None
    is_optional: bool = False


_Alternatives = list[list[_Item]]


def dead_end(grammar: str) -> str:
    """Return the rule, terminal or regular expression that matches nothing and that an answer can come to; empty if
    there is none, or if the grammar has constructs that are not known here."""
    try:
        return _Search(grammar).run()
    except _Unknown:
        return ""


def can_be_empty(regex: str) -> bool:
    """Return False for an expression that certainly matches a text."""
    return _CAN_BE_EMPTY.search(regex) is not None


class _Unknown(Exception):
    """A construct that is not known here."""


class _Search:
    def __init__(self, grammar: str) -> None:
        grammar = _DIRECTIVE.sub("", grammar)
        heads = list(_HEAD.finditer(grammar))
        ends = [head.start() for head in heads[1:]] + [len(grammar)]
        self._bodies = {head["name"]: grammar[head.end() : end] for head, end in zip(heads, ends, strict=True)}
        if not heads or grammar[: heads[0].start()].strip() or len(self._bodies) < len(heads):
            raise _Unknown
        self._rules = {name: _Parser(body).alternatives() for name, body in self._bodies.items()}
        self._terminals = {name: body for name, body in self._bodies.items() if name.isupper()}
        self._checks = 0
        self._empty_regexes: dict[str, bool] = {}
        self._alive: set[str] = set()

    def run(self) -> str:
        dead = {name for name, body in self._terminals.items() if re.search("[&~]", body) and self._is_empty(name)}
        left = [name for name in reversed(self._rules) if name not in dead]
        for _ in range(_MAX_ROUNDS):
            # Rules mostly refer to later ones, so the last ones are decided first.
            undecided = [name for name in left if not self._is_rule_alive(name)]
            if len(undecided) == len(left):
                return self._dead_end()
            left = undecided
        return ""

    def _is_rule_alive(self, name: str) -> bool:
        if not self._any_alive(self._rules[name]):
            return False
        self._alive.add(name)
        return True

    def _dead_end(self) -> str:
        """Return the first symbol that is not alive, behind others in a sequence."""
        # Terminals are regular expressions, in which a part that matches nothing does no harm.
        reached = {"start"}
        left = ["start"]
        while left:
            for sequence in _sequences(self._rules.get(left.pop(), [])):
                for i, item in enumerate(sequence):
                    if not self._is_alive(item):
                        if i > 0:
                            return item.text or _named(item) or "a group"
                        break
                    if item.text in self._rules and item.text not in reached and item.text not in self._terminals:
                        reached.add(item.text)
                        left.append(item.text)
        return ""

    def _any_alive(self, alternatives: _Alternatives) -> bool:
        return any(all(map(self._is_alive, sequence)) for sequence in alternatives)

    def _is_alive(self, item: _Item) -> bool:
        if item.is_optional:
            return True
        if item.group is not None:
            return self._any_alive(item.group)
        if item.text.startswith("/"):
            return not self._is_empty(item.text)
        return item.text in self._alive or item.text not in self._rules

    def _is_empty(self, expression: str) -> bool:
        """Let the library decide whether a terminal or regular expression matches nothing."""
        if expression in self._empty_regexes:
            return self._empty_regexes[expression]
        self._checks += 1
        rules = [f"start: {expression}"]
        if not expression.startswith("/"):
            rules += [f"{name}: {body.strip()}" for name, body in self._terminals.items()]
        elif not can_be_empty(expression):
            return False
        text = "\n".join(rules)
        is_known = self._checks <= _MAX_CHECKS and len(text) <= _MAX_TERMINALS
        self._empty_regexes[expression] = is_known and matches_nothing(lark.grammar(text))
        return self._empty_regexes[expression]


class _Parser:
    """Reads the body of one rule or terminal."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        self._at = 0

    def alternatives(self, depth: int = 0) -> _Alternatives:
        if depth > _MAX_DEPTH:
            raise _Unknown
        found: _Alternatives = [[]]
        while self._at < len(self._tokens):
            kind, token = self._tokens[self._at]
            if token in (")", "]"):
                if depth == 0:
                    raise _Unknown
                return found
            self._at += 1
            if token == "|":
                found.append([])
            elif token in ("(", "["):
                group = self.alternatives(depth + 1)
                if self._at == len(self._tokens):
                    raise _Unknown
                self._at += 1
                found[-1].append(_Item(group=group, is_optional=token == "["))
            elif kind == "repetition":
                if not found[-1]:
                    raise _Unknown
                if token in ("?", "*") or re.match(r"\{0*[,}]", token):
                    found[-1][-1] = found[-1][-1]._replace(is_optional=True)
            elif kind in ("name", "regex"):
                found[-1].append(_Item(token))
            else:
                found[-1].append(_Item())
        if depth:
            raise _Unknown
        return found


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text):
        if (token := _TOKEN.match(text, at)) is None:
            raise _Unknown
        at = token.end()
        if token.lastgroup != "blank":
            yield str(token.lastgroup), token[0]


def _sequences(alternatives: _Alternatives) -> Iterator[list[_Item]]:
    """Yield all sequences, also those in groups."""
    for sequence in alternatives:
        yield sequence
        for item in sequence:
            if item.group is not None:
                yield from _sequences(item.group)


def _named(item: _Item) -> str:
    """Return the first symbol in a group."""
    return next((one.text for sequence in _sequences(item.group or []) for one in sequence if one.text), "")
