"""Texts that an answer must not contain, as sequences of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from tokenizers import Tokenizer

BadWords: TypeAlias = tuple[tuple[int, ...], ...]
"""Sequences of token ids."""


def token_sequences(tokenizer: Tokenizer, words: Sequence[str]) -> BadWords:
    """Return the token ids of each word at the beginning of a text, and behind a space: most vocabularies have other
    tokens for it there. A model may still spell a word with other tokens."""
    if not words:
        return ()
    bare = [word.lstrip() or word for word in words]
    encodings = tokenizer.encode_batch_fast([*bare, *(f" {word}" for word in bare)], add_special_tokens=False)
    return tuple(dict.fromkeys(tuple(encoding.ids) for encoding in encodings if encoding.ids))
