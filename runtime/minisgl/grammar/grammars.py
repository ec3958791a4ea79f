"""Everything that a scheduler needs of grammars: matchers of requests, and masks of a batch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from llguidance import LLExecutor
from numpy.typing import NDArray

from minisgl.errors import GrammarError
from minisgl.grammar.compiler import MOST_INSTANCES, GrammarCompiler
from minisgl.grammar.matcher import Matcher
from minisgl.grammar.tokenizer import GrammarTokenizer

_MOST_THREADS: Final = 12
"""On 16 CPUs, 16 threads leave less time for the threads that launch steps."""
_FEW_MASKS: Final = 4
_FEW_TOKENS: Final = 16
"""Masks and tokens for which waking other threads takes longer than they do. A token takes up to 5 µs."""


class Grammars:
    """Grammars over the vocabulary of one checkpoint."""

    def __init__(
        self,
        directory: str | Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        threads: int | None = None,
    ) -> None:
        """Read the tokenizer, which takes up to seconds. `threads`: those that fill masks; None: one for each CPU.
        Raises GrammarError `grammar_unavailable`."""
        self._tokenizer = GrammarTokenizer(directory, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        self.mask_words = self._tokenizer.mask_words
        """int32 words of one row of a mask."""
        if threads is None:
            threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
        self._compiler = GrammarCompiler(self._tokenizer, most_instances=1 if threads == 1 else MOST_INSTANCES)
        self._executor = LLExecutor(threads)

    def matcher(self, text: str) -> Matcher:
        """Return a new matcher of the grammar in `Submit.grammar`. Safe to call from several threads; see
        `GrammarCompiler.compile`. Raises GrammarError."""
        return self._compiler.compile(text)

    def ready_matcher(self, text: str) -> Matcher | None:
        """Return a new matcher if that takes only microseconds; see `GrammarCompiler.ready`."""
        return self._compiler.ready(text)

    def fill(
        self, matchers: Sequence[tuple[Matcher, int]], masks: NDArray[np.int32], *, slow: bool = False
    ) -> dict[int, GrammarError]:
        """Write each matcher's mask into the row of `masks` [rows, mask_words] with its number, on several threads and
        without the GIL; other rows stay as they are, and another call may fill them at the same time. Return errors by
        row, whose masks are meaningless. `slow`: each mask probably takes longer than waking a thread.

        Bit t % 32 of word t // 32 is set for a token t that is allowed. A row has one matcher, and a matcher one row.
        """
        assert masks.dtype == np.int32 and masks.flags.c_contiguous and masks.shape[1] == self.mask_words
        address, row_bytes = masks.ctypes.data, 4 * self.mask_words
        if len(matchers) <= (1 if slow else _FEW_MASKS):
            for matcher, row in matchers:
                matcher.raw.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)
        else:
            targets = [(matchers[index][0].raw, matchers[index][1]) for index in _by_instance(matchers)]
            self._executor.unsafe_compute_mask_ptr(targets, address, row_bytes, masks.shape[0])
        if named := [row for matcher, row in matchers if matcher.names_tokens]:
            self._tokenizer.clear_padding(masks, named)
        failed = [(matcher, row) for matcher, row in matchers if matcher.raw.is_error()]
        return {row: error for matcher, row in failed if (error := matcher.error()) is not None}

    def consume(self, tokens: Sequence[tuple[Matcher, int]]) -> list[bool]:
        """`Matcher.consume` for many matchers, without the GIL unless they are few."""
        if len(tokens) <= _FEW_TOKENS:
            return [matcher.raw.consume_token(token) for matcher, token in tokens]
        order = _by_instance(tokens)
        consumed = self._executor.consume_token_par([(tokens[index][0].raw, tokens[index][1]) for index in order])
        if all(consumed):
            return consumed
        accepted = dict(zip(order, consumed, strict=True))
        return [accepted[index] for index in range(len(tokens))]


def _by_instance(entries: Sequence[tuple[Matcher, int]]) -> Sequence[int]:
    """Indices in the order of instances: threads take neighbours, which then seldom wait for one another."""
    instances = [matcher.instance for matcher, _ in entries]
    return sorted(range(len(entries)), key=instances.__getitem__)
