"""The tokenizer of a checkpoint, as grammars need it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from llguidance import LLTokenizer
from numpy.typing import NDArray

from minisgl.errors import GrammarError

_PLAIN: Final = r'[^"\\\x00-\x1F\x7F]'
_SLICES: Final = (
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_PLAIN}{{1,{length}}}" for length in (2, 4, 6, 8, 10, 14, 20, 30)),
    f"{_PLAIN}+",
)
"""Groups of tokens whose masks are computed once. A string may be near the end of its `maxLength`: with the library's
groups alone (10, 30 and any number of characters) the slowest 1 % of masks of 20 fields take 0.98 ms, else 0.5."""


class GrammarTokenizer:
    """Texts of all tokens of a vocabulary, in a tree."""

    def __init__(self, directory: str | Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Read tokenizer.json, which takes up to a second or two. `vocab_size`: number of logits, which may be more
        than tokens. Raises GrammarError `grammar_unavailable`."""
        path = Path(directory) / "tokenizer.json"
        try:
            self.tokens = _load(path.read_text("utf-8"), vocab_size, eos_token_ids)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library is no Exception
            problem = f"{path} cannot be used for constrained answers: {error}"
            raise GrammarError("grammar_unavailable", problem) from error
        self.mask_words = (vocab_size + 31) // 32
        """int32 words of one row of a mask."""
        tokens = vocab_size
        while tokens and self.tokens.decode_bytes([tokens - 1]) == b"<[%d]>" % (tokens - 1):
            tokens -= 1
        self._padding_word = tokens // 32
        bits = np.arange(self._padding_word * 32, self.mask_words * 32) < tokens
        self._tokens_behind = np.packbits(bits, bitorder="little").view(np.int32)

    def clear_padding(self, masks: NDArray[np.int32], rows: Sequence[int] | slice = slice(None)) -> None:
        """Clear the bits of ids at the end of the vocabulary that are no tokens, in rows of a mask. Only a grammar that
        names token ids sets them."""
        if self._padding_word < self.mask_words:
            masks[rows, self._padding_word :] &= self._tokens_behind


def _load(text: str, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    try:
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids), slices=list(_SLICES))
    except ValueError:
        # The configuration of a model may name ids that are no tokens, which would never be sampled.
        tokens = LLTokenizer(text).vocab_size
        known = [token for token in eos_token_ids if token < tokens]
        if not known:
            raise
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=known, slices=list(_SLICES))
