"""Regular expressions as automata that read a text character by character, in time linear in its length.

An automaton (Thompson, 1968) tells after each character whether there is a match, and from where on more text could
complete one. The syntax is Python's, without what an automaton cannot do: lookaround, back references and atomic
groups. Assertions on what follows a match (`$`, `\\b`) are refused, too, because the text that follows is not generated
yet.

No library is used because none answers both questions at a bounded cost. Python's engine backtracks, which takes it
hours for some expressions of ten characters, and knows no partial matches. `regex` (`partial=True`) does, but reads the
text that is held back again for each token, from each of its characters on: `a[^z]*z` on 4,096 letters takes 26 s in
all, here 0.02 s, and its timeout would only turn that into an error. RE2 is linear, but has neither partial matches nor
a state that can be continued. Hyperscan has such a state, but does not say from where on text must be held back.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, Final

from minisgl.errors import PromptError

MAX_STATES: Final = 256
"""States of all expressions of a request together: the time for a character grows with them, to 25 µs."""
_MAX_CACHED_CHARACTERS: Final = 4096

_parser: Final[Any] = import_module("re._parser")

_UNSUPPORTED: Final = {
    "ASSERT": "lookaround",
    "ASSERT_NOT": "lookaround",
    "GROUPREF": "a back reference",
    "GROUPREF_EXISTS": "a conditional group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive quantifier",
    "AT": "`$`, `\\Z`, `\\b` or `\\B`, which depends on text that is not generated yet",
}

_CATEGORIES: Final[dict[str, Callable[[str], bool]]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": lambda character: character.isalnum() or character == "_",
}


BEGIN: Final = 0
"""Position at the beginning of a text."""
NEWLINE: Final = 1
"""Position behind a line break."""
OTHER: Final = 2


class PatternError(PromptError):
    """An expression that cannot be searched for. The message says why: "contains a back reference"."""

    def __init__(self, message: str) -> None:
        super().__init__("invalid_request", message, "stop_regex")


class _Characters:
    """A set of characters."""

    def __init__(self, items: Sequence[tuple[Any, Any]], flags: int) -> None:
        self._negated = False
        self._literals: set[int] = set()
        self._ranges: list[tuple[int, int]] = []
        self._categories: list[tuple[bool, Callable[[str], bool]]] = []
        self._ignore_case = bool(flags & re.IGNORECASE)
        self._ascii = bool(flags & re.ASCII)
        for code, value in items:
            match str(code):
                case "NEGATE":
                    self._negated = True
                case "LITERAL":
                    self._literals.add(value)
                case "RANGE":
                    self._ranges.append(value)
                case _:
                    name = str(value)
                    self._categories.append(("NOT_" in name, _CATEGORIES[name.replace("NOT_", "")]))

    def __contains__(self, character: str) -> bool:
        variants = {character}
        if self._ignore_case:
            variants |= {character.lower(), character.upper(), character.lower().upper(), character.upper().lower()}
        return any(len(variant) == 1 and self._has(variant) for variant in variants) != self._negated

    def _has(self, character: str) -> bool:
        code = ord(character)
        return (
            code in self._literals
            or any(first <= code <= last for first, last in self._ranges)
            or any(self._is(kind, character) != negated for negated, kind in self._categories)
        )

    def _is(self, kind: Callable[[str], bool], character: str) -> bool:
        return kind(character) and (character.isascii() or not self._ascii)


_ALL: Final = [(_parser.NEGATE, None)]
_NEWLINE: Final = (_parser.LITERAL, ord("\n"))


class Automaton:
    """Nondeterministic automaton of several texts and expressions, which are numbered in this order."""

    def __init__(self, texts: Sequence[str], expressions: Sequence[str]) -> None:
        """Raises PatternError."""
        self._sets: list[_Characters] = []
        self._nodes: list[tuple[str, Any, tuple[int, ...]]] = []
        """Kind, its value and the next nodes: `read` a character of a set, `split`, `begin` of text or line, `match`
        of an expression."""
        self._known: dict[str, frozenset[int]] = {}
        self._distinct: dict[frozenset[int], frozenset[int]] = {}
        """Values of `_known`, of which most are equal."""
        self._limit = sum(map(len, texts)) + len(texts) + MAX_STATES
        begins = []
        for index, text in enumerate(texts):
            items = [(_parser.LITERAL, ord(character)) for character in text]
            begins.append(self._sequence(items, 0, self._node("match", index)))
        for index, expression in enumerate(expressions, len(texts)):
            parsed = _parse(expression)
            begins.append(self._sequence(parsed, parsed.state.flags, self._node("match", index)))
        begin = self._node("split", None, *begins)
        self._begins = [self._states_at_begin(begin, before) for before in (BEGIN, NEWLINE, OTHER)]
        self.set_of = [value if kind == "read" else -1 for kind, value, _ in self._nodes]
        """Number of the set of characters that a state reads."""
        self.next_state = [self._next_state(*node) for node in self._nodes]
        """State behind a state; −1 where `follow` must find them."""

    def states_at_begin(self, before: int) -> Sequence[int]:
        """Return the states in which a match may begin, behind `before`: BEGIN, NEWLINE or OTHER."""
        return self._begins[before]

    def follow(self, state: int, before: int, seen: set[int], matches: list[int]) -> Iterator[int]:
        """Yield the states behind the character that `state` has read, but for those that were `seen`. The indices of
        matched expressions are added to `matches`. All calls for one character share `seen`: together they take time
        linear in the size of the automaton."""
        left = [self._nodes[state][2][0]]
        while left:
            node = left.pop()
            if node in seen:
                continue
            seen.add(node)
            kind, value, following = self._nodes[node]
            if kind == "read":
                yield node
            elif kind == "match":
                matches.append(value)
            elif kind == "split" or before == BEGIN or (value and before == NEWLINE):
                left += following

    def sets_with(self, character: str) -> frozenset[int]:
        """Return the numbers of the sets of characters that have this one."""
        known = self._known.get(character)
        if known is None:
            if len(self._known) >= _MAX_CACHED_CHARACTERS:
                self._known.clear()
                self._distinct.clear()
            known = frozenset(number for number, characters in enumerate(self._sets) if character in characters)
            known = self._known[character] = self._distinct.setdefault(known, known)
        return known

    def _node(self, kind: str, value: Any, *following: int) -> int:
        if len(self._nodes) >= self._limit:
            raise PatternError(f"is too large: it has more than {MAX_STATES} states; use smaller repetitions")
        self._nodes.append((kind, value, following))
        return len(self._nodes) - 1

    def _read(self, items: Sequence[tuple[Any, Any]], flags: int, following: int) -> int:
        self._sets.append(_Characters(items, flags))
        return self._node("read", len(self._sets) - 1, following)

    def _sequence(self, items: Any, flags: int, following: int) -> int:
        """Add nodes that read `items` and continue with `following`. Returns the first one."""
        for code, value in reversed(list(items)):
            following = self._item(str(code), value, flags, following)
        return following

    def _item(self, code: str, value: Any, flags: int, following: int) -> int:
        match code:
            case "LITERAL":
                return self._read([(_parser.LITERAL, value)], flags, following)
            case "NOT_LITERAL":
                return self._read([*_ALL, (_parser.LITERAL, value)], flags, following)
            case "ANY":
                return self._read(_ALL if flags & re.DOTALL else [*_ALL, _NEWLINE], flags, following)
            case "IN":
                return self._read(value, flags, following)
            case "BRANCH":
                return self._node("split", None, *[self._sequence(one, flags, following) for one in value[1]])
            case "SUBPATTERN":
                _, added, removed, items = value
                return self._sequence(items, (flags | added) & ~removed, following)
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, items = value
                return self._repeat(least, most, items, flags, following)
            case "AT" if str(value) in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
                lines = str(value) == "AT_BEGINNING" and bool(flags & re.MULTILINE)
                return self._node("begin", lines, following)
        raise PatternError(f"contains {_UNSUPPORTED.get(code, code.lower())}; leave it out")

    def _repeat(self, least: int, most: int, items: Any, flags: int, following: int) -> int:
        if most is _parser.MAXREPEAT:
            loop = self._node("split", None)
            self._nodes[loop] = ("split", None, (self._sequence(items, flags, loop), following))
            first = loop
        else:
            first = following
            for _ in range(most - least):
                first = self._node("split", None, self._sequence(items, flags, first), following)
        for _ in range(least):
            before, first = first, self._sequence(items, flags, first)
            if first == before:
                # Nothing is repeated, perhaps a billion times.
                break
        return first

    def _next_state(self, kind: str, _: Any, following: tuple[int, ...]) -> int:
        return following[0] if kind == "read" and self._nodes[following[0]][0] == "read" else -1

    def _states_at_begin(self, begin: int, before: int) -> list[int]:
        self._nodes.append(("read", None, (begin,)))
        matches: list[int] = []
        states = list(self.follow(len(self._nodes) - 1, before, set(), matches))
        self._nodes.pop()
        if matches:
            raise PatternError("matches the empty text, which would end every answer; require at least one character")
        return states


@lru_cache(maxsize=256)
def automaton(texts: tuple[str, ...], expressions: tuple[str, ...]) -> Automaton:
    """Return the automaton of texts and expressions; requests repeat them. Raises PatternError."""
    try:
        return Automaton(texts, expressions)
    except RecursionError:
        raise PatternError("is nested too deeply") from None


def _parse(expression: str) -> Any:
    try:
        with warnings.catch_warnings():
            # About syntax that a later version of Python may read in another way.
            warnings.simplefilter("ignore")
            return _parser.parse(expression)
    except (re.error, OverflowError, ValueError) as error:
        raise PatternError(f"is not a valid regular expression: {str(error)[:100]}") from None
