"""Compiled grammars, kept by their text."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import Final

import numpy as np
from llguidance import LLMatcher

from minisgl.grammar.errors import GrammarError
from minisgl.grammar.limits import LIMITS
from minisgl.grammar.matcher import Matcher
from minisgl.grammar.threads import deep_threads
from minisgl.grammar.tokenizer import GrammarTokenizer

CACHE_BYTES: Final = 256 << 20
ANSWERS_PER_INSTANCE: Final = 8
"""A mask takes 20 µs on average, and waking another thread about as long as five of them."""
_BASE_BYTES: Final = 256 << 10
_BYTES_PER_CHARACTER: Final = 64


class _Grammar:
    """A grammar in one or several instances. Answers of one instance share what was computed of it, but only one thread
    at a time computes masks of them."""

    def __init__(self) -> None:
        self.instances: list[Future[Matcher]] = []
        self.bytes = 0
        """Approximate memory of the compiled instances."""
        self._answers: list[int] = []
        """Matchers that each instance has made."""

    def join(self, most: int) -> tuple[int, bool]:
        """Number of the instance for another answer, and whether it is a new one, which the caller compiles."""
        count = len(self.instances)
        if count < most and sum(self._answers) >= ANSWERS_PER_INSTANCE * count:
            self.instances.append(Future())
            self._answers.append(1)
            return count, True
        index = self._answers.index(min(self._answers))
        self._answers[index] += 1
        return index, False


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: GrammarTokenizer, cache_bytes: int = CACHE_BYTES, most_instances: int = 1) -> None:
        """`cache_bytes`: most memory of grammars that are kept, as estimated from their texts. `most_instances`: those
        of one grammar, as many as threads compute masks."""
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
        if is_new:
            try:
                instance.set_result(self._instance(text))
            except GrammarError as error:
                instance.set_exception(error)
                self._drop(text, grammar)
                raise
            self._keep(text, grammar)
        return instance.result().copy(index)

    def _instance(self, text: str) -> Matcher:
        try:
            return deep_threads.submit(self._compile, text).result()
        except GrammarError:
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise GrammarError("invalid_grammar", f"the grammar cannot be compiled: {error}") from error

    def _compile(self, text: str) -> Matcher:
        raw = LLMatcher(self._tokenizer.tokens, text, log_level=0, limits=LIMITS)
        if raw.is_error():
            raise GrammarError("invalid_grammar", raw.get_error())
        compiled = Matcher(raw, self._tokenizer)
        # The first mask takes longest, and shows whether any answer is possible.
        mask = np.zeros(self._tokenizer.mask_words, np.int32)
        try:
            compiled.fill_mask(mask)
        except GrammarError as error:
            raise GrammarError("invalid_grammar", f"no answer is possible under the grammar: {error.message}") from None
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
