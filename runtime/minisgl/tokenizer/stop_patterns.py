"""Stop strings and regular expressions that end an answer, searched for together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from minisgl.tokenizer.patterns import BEGIN, NEWLINE, OTHER, automaton

MAX_MATCH: Final = 4096
"""Longest match, in characters; it bounds the text that is held back."""


class StopPatterns:
    """Looks for the earliest match of several stop strings and regular expressions in a text that arrives in pieces.

    The match that ends first counts, and of several that end at the same character the longest: so the answer does not
    depend on how the text is cut into pieces, and ends as soon as there is a match. Text is held back from the first
    character on that could begin a match. `StopStrings` does the same for stop strings alone, in less time.
    """

    def __init__(self, stops: Sequence[str], expressions: Sequence[str], include: bool = False) -> None:
        """Raises PatternError."""
        self._sources = (*stops, *expressions)
        self._automaton = automaton(tuple(stops), tuple(expressions))
        self._include = include
        self._held = ""
        self._end = 0
        """Characters of the text so far; the last ones of them are held."""
        self._before = BEGIN
        self._threads: dict[int, int] = {}
        """State → earliest beginning of a match that may go on there, in the order of beginnings."""
        self.stopped = False
        self.matched: str | None = None
        """Stop string or regular expression that was found."""

    def push(self, piece: str, may_stop: bool = True) -> str:
        """Add text and return the part that is safe to send now; nothing after a match (`stopped`). Without `may_stop`
        a match that ends in this piece is ordinary text."""
        if self.stopped or not piece:
            return ""
        text, held_at = self._held + piece, self._end - len(self._held)
        for character in piece:
            match = self._step(character)
            if match is not None and may_stop:
                begin, index = match
                self.stopped = True
                self.matched = self._sources[index]
                self._held = ""
                return text[: (self._end if self._include else begin) - held_at]
        begin = next(iter(self._threads.values()), self._end)
        self._held = text[begin - held_at :]
        return text[: begin - held_at]

    def finish(self) -> str:
        """Return the held text, when the answer has ended for another reason."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> tuple[int, int] | None:
        """Read a character. Returns beginning and index of the longest match that ends with it."""
        machine, oldest = self._automaton, self._end + 1 - MAX_MATCH
        set_of, next_state = machine.set_of, machine.next_state
        sets = machine.sets_with(character)
        begins = dict.fromkeys(machine.states_at_begin(self._before), self._end)
        self._before = NEWLINE if character == "\n" else OTHER
        self._end += 1
        threads: dict[int, int] = {}
        seen: set[int] = set()
        match: tuple[int, int] | None = None
        # In the order of their beginnings, which the new threads have again: the earliest one to reach a state counts.
        for state, begin in (*self._threads.items(), *begins.items()):
            if begin < oldest or set_of[state] not in sets:
                continue
            if (following := next_state[state]) >= 0:
                if following not in seen:
                    seen.add(following)
                    threads[following] = begin
                continue
            matches: list[int] = []
            threads.update(dict.fromkeys(machine.follow(state, self._before, seen, matches), begin))
            for index in matches:
                match = min(match or (begin, index), (begin, index))
        self._threads = threads
        return match
