"""Grammars of a toy language, and the tokens that a constrained request may generate, by definition.

A `ToyGrammar` depends on all tokens of the text before, so a token that is lost, repeated or consumed by another
request changes what is allowed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from minisgl.errors import GrammarError
from minisgl.scheduler.constraints import Constraint, Vocabulary
from minisgl.scheduler.request import Request
from minisgl.wire.messages import Submit, Thinking
from minisgl.wire.plan import IntArray


class ToyGrammar(msgspec.Struct, frozen=True):
    """A text of `length` tokens without EOS, or fewer: the sum of its first n tokens is a multiple of `factor`. It may
    end after `least` tokens."""

    factor: int
    length: int
    least: int
    valid: bool = True

    @property
    def text(self) -> str:
        return msgspec.json.encode(self).decode()

    def allowed(self, output: Sequence[int], vocab_size: int, eos: frozenset[int]) -> set[int]:
        """Tokens that may follow `output`."""
        tokens = set(range(-sum(output) % self.factor, vocab_size, self.factor)) - eos
        if len(output) >= self.length:
            tokens = set()
        return tokens | eos if len(output) >= self.least or not tokens else tokens


class ToyMatcher:
    """Stands in for `grammar.matcher.Matcher`."""

    def __init__(self, grammar: ToyGrammar, vocabulary: Vocabulary, vocab_size: int) -> None:
        self.grammar = grammar
        self.vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._output: list[int] = []
        self.refuses = False
        """Refuse the next token, whatever it is."""
        self.fails = False
        """Fail to fill the next mask."""
        self.is_alone = True

    @property
    def allowed(self) -> set[int]:
        return self.grammar.allowed(self._output, self._vocab_size, self.vocabulary.eos_ids)

    @property
    def can_end(self) -> bool:
        return bool(self.allowed & self.vocabulary.eos_ids)

    def consume(self, token: int) -> bool:
        assert token not in self.vocabulary.eos_ids
        if self.refuses or token not in self.allowed:
            return False
        self._output.append(token)
        return True


class ToyGrammars:
    """Stands in for `scheduler.compiling.ConstraintCompiler` and for `grammar.grammars.Grammars`, without threads:
    requests are compiled by `compile`, or when the step loop has nothing else to do. `at_once`: or when they arrive.
    Those of the texts `known` are ready."""

    def __init__(self, vocab_size: int, *, at_once: bool = False) -> None:
        self.grammars: Any = self
        self._at_once = at_once
        self.finished: deque[tuple[Request, Future[Constraint]]] = deque()
        self.started: list[tuple[Request, Submit, Vocabulary, Future[Constraint]]] = []
        self.matchers: list[ToyMatcher] = []
        self.known: set[str] = set()
        self._vocab_size = vocab_size

    def ready(self, message: Submit, vocabulary: Vocabulary) -> Constraint | None:
        grammar = msgspec.json.decode(message.constraint.grammar, type=ToyGrammar)
        if message.output or message.constraint.grammar not in self.known or not grammar.valid:
            return None
        return self._constraint(grammar, message, vocabulary)

    def start(self, request: Request, message: Submit, vocabulary: Vocabulary) -> Future[Constraint]:
        future: Future[Constraint] = Future()
        self.started.append((request, message, vocabulary, future))
        if self._at_once:
            self.compile(1)
        return future

    def wait(self, seconds: float) -> None:
        self.compile(len(self.started))

    def compile(self, count: int) -> None:
        """Compile some of the requests, the last one first."""
        for _ in range(min(count, len(self.started))):
            request, message, vocabulary, future = self.started.pop()
            if future.cancelled():
                continue
            grammar = msgspec.json.decode(message.constraint.grammar, type=ToyGrammar)
            if grammar.valid:
                future.set_result(self._constraint(grammar, message, vocabulary))
            else:
                future.set_exception(GrammarError("invalid_grammar", "this grammar is not valid"))
            self.finished.append((request, future))

    def _constraint(self, grammar: ToyGrammar, message: Submit, vocabulary: Vocabulary) -> Constraint:
        matcher: Any = ToyMatcher(grammar, vocabulary, self._vocab_size)
        self.matchers.append(matcher)
        constraint = Constraint(message, vocabulary, matcher)
        constraint.replay(np.frombuffer(message.output, "<i4").tolist())
        return constraint

    def consume(self, tokens: Sequence[tuple[Any, int]]) -> list[bool]:
        return [matcher.consume(token) for matcher, token in tokens]

    def fill(
        self, matchers: Sequence[tuple[Any, int]], masks: IntArray, *, slow: bool = False
    ) -> dict[int, GrammarError]:
        for matcher, row in matchers:
            masks[row] = matcher.vocabulary.mask(matcher.allowed)
        failed = [row for matcher, row in matchers if matcher.fails]
        return {row: GrammarError("grammar_failed", "this mask cannot be computed") for row in failed}


def allowed_tokens(message: Submit, output: Sequence[int], vocab_size: int, eos_ids: Collection[int]) -> set[int]:
    """Tokens that may follow `output`: all tokens for a request without a constraint, none if its constraint allows
    none."""
    if not message.is_constrained:
        return set(range(vocab_size))
    eos = frozenset(eos_ids)
    grammar = msgspec.json.decode(message.constraint.grammar, type=ToyGrammar) if message.constraint.grammar else None
    everything = set(range(vocab_size))
    tokens, text = everything, list(output)
    if message.constraint.thinking is not None and (grammar is not None or message.constraint.thinking.budget >= 0):
        forced, within, text = _reasoning(message.constraint.thinking, output, once=grammar is not None)
        if forced is not None:
            return {forced}
        tokens = everything if within or grammar is None else grammar.allowed(text, vocab_size, eos)
        if grammar is not None and within and not message.params.ignore_eos:
            # The end of an answer that has only reasoned would look like a complete one.
            tokens = tokens - eos
        if grammar is not None and not output and not within:
            tokens = tokens | {message.constraint.thinking.start[0]}
        follows = grammar is not None and not within
    else:
        tokens = everything if grammar is None else grammar.allowed(text, vocab_size, eos)
        follows = grammar is not None
    stops = set(message.params.stop_token_ids)
    if follows and tokens & eos:
        tokens = tokens | stops
    ends = stops | (eos if grammar is not None or not message.params.ignore_eos else set())
    if message.params.allowed_token_ids:
        tokens = tokens & ({*message.params.allowed_token_ids} | (ends if grammar is not None else set()))
    for *start, last in message.constraint.bad_words:
        if list(output[len(output) - len(start) :]) == start and len(output) >= len(start):
            tokens = tokens - {last}
    if len(output) < message.params.min_tokens:
        tokens = tokens - ends or tokens
    elif message.params.ignore_eos and follows:
        tokens = tokens - eos or tokens
    return tokens


def eos_ends(message: Submit, output: Sequence[int]) -> bool:
    """True when an EOS behind `output` ends the answer even if ignored: it is allowed only where nothing else is."""
    if not message.constraint.grammar or message.constraint.thinking is None:
        return bool(message.constraint.grammar)
    forced, within, _ = _reasoning(message.constraint.thinking, output, once=True)
    return not within and forced is None


def _reasoning(thinking: Thinking, output: Sequence[int], *, once: bool) -> tuple[int | None, bool, list[int]]:
    """The token that must follow, whether the next token belongs to reasoning, and the text behind reasoning."""
    is_open, spent, rest = thinking.is_open, 0, list(output)
    while True:
        marker = list(thinking.end if is_open else thinking.start)
        if once and not is_open:
            begun = next((n for n in range(len(marker), 0, -1) if rest[:n] == marker[:n]), 0)
            if not begun:
                return None, False, rest
            if begun < len(marker):
                return marker[begun], True, []
            is_open, rest = True, rest[begun:]
            continue
        found = next((i for i in range(len(rest)) if rest[i : i + len(marker)] == marker), None)
        if found is None:
            break
        spent += is_open * (found + len(marker))
        rest = rest[found + len(marker) :]
        if is_open and once:
            return None, False, rest
        is_open = not is_open
    if not is_open:
        return None, False, []
    if 0 <= thinking.budget <= spent + len(rest):
        begun = next(n for n in range(len(marker), -1, -1) if n <= len(rest) and rest[len(rest) - n :] == marker[:n])
        return marker[begun], True, []
    return None, True, []
