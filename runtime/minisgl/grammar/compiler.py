"""Compiled grammars, kept by their text."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from typing import Final
from weakref import WeakSet

import numpy as np
from llguidance import LLMatcher

from minisgl.errors import GrammarError
from minisgl.grammar.lark import TOKEN_IDS
from minisgl.grammar.limits import LIMITS, code_of, deep_threads, first_line
from minisgl.grammar.matcher import Matcher
from minisgl.grammar.tokenizer import GrammarTokenizer

CACHE_BYTES: Final = 256 << 20
QUICK_SECONDS: Final = 0.02
"""CPU time to compile a grammar up to which each answer gets an instance of its own. Masks of one instance wait for one
another, which takes longer than to compute them: 64 masks of a schema of 20 fields take 1.1 ms on 16 threads with 8
answers for each instance, 0.8 ms with one, and 2.4 ms on one thread (means, 16 cores)."""
_ANSWERS_PER_SLOW_INSTANCE: Final = 8
MOST_INSTANCES: Final = 64
"""Instances of one grammar, each of a quarter of a megabyte."""
_BASE_BYTES: Final = 256 << 10
_BYTES_PER_CHARACTER: Final = 64


class _Grammar:
    """A grammar in one or several instances. Answers of one instance share what was computed of it, but only one thread
    at a time computes masks of them."""

    def __init__(self) -> None:
        self.instances: list[Future[Matcher]] = []
        self.bytes = 0
        """Approximate memory of the compiled instances."""
        self.is_quick = False
        """The newest instance was compiled within QUICK_SECONDS."""
        self._answers: list[WeakSet[Matcher]] = []
        """Matchers in use of each instance."""
        self._joining: list[int] = []
        """Answers of each instance that have no matcher yet."""
        self._newest = -1
        """Instance of the newest matcher."""

    def join(self, most: int) -> tuple[int, bool]:
        """Number of the instance for another answer, and whether it is a new one, which the caller compiles. `joined`
        follows."""
        count = len(self.instances)
        if not self.is_quick:
            most = min(most, 1 + sum(map(self._load, range(count))) // _ANSWERS_PER_SLOW_INSTANCE)
        index = min(range(count), key=self._load, default=0)
        is_new = count == 0 or (count < most and self._load(index) > 0)
        if is_new:
            index = count
            self.instances.append(Future())
            self._answers.append(WeakSet())
            self._joining.append(0)
        self._joining[index] += 1
        return index, is_new

    def joined(self, index: int, matcher: Matcher | None) -> None:
        """Count the matcher of an answer that joined; None: it has none, because of an error."""
        self._joining[index] -= 1
        if matcher is not None:
            self.add(index, matcher)

    def add(self, index: int, matcher: Matcher) -> None:
        """Count a matcher of an instance."""
        answers = self._answers[index]
        answers.add(matcher)
        matcher.answers = answers
        self._newest = index

    def idle(self) -> int | None:
        """Number of a compiled instance without answers; None: there is none."""
        count = len(self.instances)
        # The newest one knows most of the grammar. Those behind it have been idle for longest.
        numbers = ((max(self._newest, 0) + after) % count for after in range(count))
        return next((index for index in numbers if not self._load(index) and self.instances[index].done()), None)

    def _load(self, index: int) -> int:
        return len(self._answers[index]) + self._joining[index]


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: GrammarTokenizer, cache_bytes: int = CACHE_BYTES, most_instances: int = 1) -> None:
        """`cache_bytes`: most memory of grammars that are kept, as estimated from their texts. `most_instances`: those
        of one grammar."""
        self._tokenizer = tokenizer
        self._cache_bytes = cache_bytes
        self._most_instances = most_instances
        self._grammars: OrderedDict[str, _Grammar] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def compile(self, text: str) -> Matcher:
        """Return a new matcher at the beginning of a grammar. Takes up to a second for a grammar that is not kept,
        mostly without the GIL. Raises GrammarError."""
        with self._lock:
            grammar = self._grammars.setdefault(text, _Grammar())
            self._grammars.move_to_end(text)
            index, is_new = grammar.join(self._most_instances)
            instance = grammar.instances[index]
        matcher: Matcher | None = None
        try:
            if is_new:
                self._compile_instance(text, grammar, instance)
            matcher = instance.result().copy(index)
            return matcher
        finally:
            with self._lock:
                grammar.joined(index, matcher)

    def ready(self, text: str) -> Matcher | None:
        """Return a new matcher at the beginning of a grammar without waiting, from a compiled instance that no answer
        uses; None: only `compile` can."""
        with self._lock:
            grammar = self._grammars.get(text)
            index = None if grammar is None else grammar.idle()
            if grammar is None or index is None:
                return None
            self._grammars.move_to_end(text)
            matcher = grammar.instances[index].result().copy(index)
            grammar.add(index, matcher)
            return matcher

    def _compile_instance(self, text: str, grammar: _Grammar, instance: Future[Matcher]) -> None:
        try:
            compiled, seconds = self._instance(text)
        except GrammarError as error:
            instance.set_exception(error)
            self._drop(text, grammar)
            raise
        grammar.is_quick = seconds <= QUICK_SECONDS
        instance.set_result(compiled)
        self._keep(text, grammar)

    def _instance(self, text: str) -> tuple[Matcher, float]:
        """Compile on a thread with a deep stack. Returns the matcher and the seconds of CPU time."""
        try:
            return deep_threads.submit(self._timed, text).result()
        except GrammarError:
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise GrammarError("invalid_grammar", f"the grammar cannot be compiled: {error}") from error

    def _timed(self, text: str) -> tuple[Matcher, float]:
        began = time.thread_time()
        return self._compile(text), time.thread_time() - began

    def _compile(self, text: str) -> Matcher:
        raw = LLMatcher(self._tokenizer.tokens, text, log_level=0, limits=LIMITS)
        if raw.is_error():
            problem = first_line(raw.get_error())
            raise GrammarError(code_of(problem, "invalid_grammar"), problem)
        compiled = Matcher(raw, self._tokenizer, names_tokens=TOKEN_IDS in text)
        # The first mask takes longest, and shows whether any answer is possible.
        mask = np.zeros(self._tokenizer.mask_words, np.int32)
        try:
            compiled.fill_mask(mask)
        except GrammarError as error:
            code = "invalid_grammar" if error.code == "no_allowed_token" else error.code
            raise GrammarError(code, f"no answer is possible under the grammar: {error.message}") from None
        if not mask.any():
            raise GrammarError("invalid_grammar", "no answer is possible under the grammar")
        return compiled

    def _keep(self, text: str, grammar: _Grammar) -> None:
        """Count the memory of a compiled instance, and forget what was not used for longest."""
        with self._lock:
            if self._grammars.get(text) is not grammar:
                return
            grammar.bytes += _size(text)
            self._bytes += _size(text)
            while self._bytes > self._cache_bytes and len(self._grammars) > 1:
                self._bytes -= self._grammars.popitem(last=False)[1].bytes

    def _drop(self, text: str, grammar: _Grammar) -> None:
        with self._lock:
            if self._grammars.get(text) is grammar:
                del self._grammars[text]
                self._bytes -= grammar.bytes


def _size(text: str) -> int:
    """Return the approximate memory of a compiled grammar, in bytes."""
    return _BASE_BYTES + _BYTES_PER_CHARACTER * len(text)
