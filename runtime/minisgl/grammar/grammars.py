"""Everything that a scheduler needs of grammars: matchers of requests, and masks of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llguidance import LLExecutor
from numpy.typing import NDArray

from minisgl.grammar.compiler import GrammarCompiler
from minisgl.grammar.errors import GrammarError
from minisgl.grammar.matcher import Matcher
from minisgl.grammar.tokenizer import GrammarTokenizer


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
        """Read the tokenizer, which takes up to seconds. `threads`: those that fill masks; None: most of the CPUs.
        Raises GrammarError `grammar_unavailable`."""
        self._tokenizer = GrammarTokenizer(directory, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        self.mask_words = self._tokenizer.mask_words
        """int32 words of one row of a mask."""
        self._compiler = GrammarCompiler(self._tokenizer)
        self._executor = LLExecutor(threads)

    def matcher(self, text: str) -> Matcher:
        """Return a new matcher of the grammar in `Submit.grammar`. Safe to call from several threads; see
        `GrammarCompiler.compile`. Raises GrammarError."""
        return self._compiler.compile(text)

    def fill(self, matchers: Sequence[tuple[Matcher, int]], masks: NDArray[np.int32]) -> dict[int, GrammarError]:
        """Write each matcher's mask into the row of `masks` [rows, mask_words] with its number, on several threads and
        without the GIL; other rows stay as they are. Return errors by row, whose masks are meaningless.

        Bit t % 32 of word t // 32 is set for a token t that is allowed. A row has one matcher, and a matcher one row.
        """
        assert masks.dtype == np.int32 and masks.flags.c_contiguous and masks.shape[1] == self.mask_words
        targets = [(matcher.raw, row) for matcher, row in matchers]
        self._executor.unsafe_compute_mask_ptr(targets, masks.ctypes.data, 4 * self.mask_words, masks.shape[0])
        self._tokenizer.clear_padding(masks, [row for _, row in matchers])
        return {row: error for matcher, row in matchers if (error := matcher.error()) is not None}

    def consume(self, tokens: Sequence[tuple[Matcher, int]]) -> list[bool]:
        """`Matcher.consume` for many matchers, on several threads."""
        return self._executor.consume_token_par([(matcher.raw, token) for matcher, token in tokens])
