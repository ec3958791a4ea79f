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
_BASE_BYTES: Final = 256 << 10
_BYTES_PER_CHARACTER: Final = 64


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: GrammarTokenizer, cache_bytes: int = CACHE_BYTES) -> None:
        """`cache_bytes`: most memory of grammars that are kept, as estimated from their texts."""
        self._tokenizer = tokenizer
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[str, Matcher] = OrderedDict()
        self._bytes = 0
        self._compiling: dict[str, Future[Matcher]] = {}
        self._lock = threading.Lock()

    def compile(self, text: str) -> Matcher:
        """Return a new matcher at the beginning of a grammar. Takes up to a second for a grammar that is not kept,
        mostly without the GIL. Raises GrammarError."""
        with self._lock:
            if (kept := self._cache.get(text)) is not None:
                self._cache.move_to_end(text)
                return kept.copy()
            running = self._compiling.get(text)
            mine = self._compiling[text] = Future() if running is None else running
        if running is not None:
            return running.result().copy()
        try:
            compiled = deep_threads.submit(self._compile, text).result()
        except GrammarError as error:
            mine.set_exception(error)
            raise
        except BaseException as error:  # a panic of the library is no Exception
            refusal = GrammarError("invalid_grammar", f"the grammar cannot be compiled: {error}")
            mine.set_exception(refusal)
            raise refusal from error
        else:
            mine.set_result(compiled)
            self._keep(text, compiled)
        finally:
            with self._lock:
                del self._compiling[text]
        return compiled.copy()

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

    def _keep(self, text: str, compiled: Matcher) -> None:
        with self._lock:
            self._cache[text] = compiled
            self._bytes += _size(text)
            while self._bytes > self._cache_bytes and len(self._cache) > 1:
                self._bytes -= _size(self._cache.popitem(last=False)[0])


def _size(text: str) -> int:
    """Return the approximate memory of a compiled grammar, in bytes."""
    return _BASE_BYTES + _BYTES_PER_CHARACTER * len(text)
