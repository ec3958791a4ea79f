"""The most text that one token can stand for: it proves that a text is too long without encoding it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

from minisgl.tokenizer.token_bytes import BYTE_LEVEL_ALPHABET, BYTE_TOKENS

_COMPOSITION: Final = 4
"""Bytes of UTF-8 that NFC makes one byte of, at most: 3, as of the Kelvin sign, with some distance."""
_KEEP_LENGTH: Final = frozenset({"ByteLevel", "Prepend"})
"""Normalizers that remove nothing."""
_KEEP_TEXT: Final = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"})
"""Pre-tokenizers that remove nothing; those that split at a pattern have a behavior."""


class _Model(msgspec.Struct):
    type: str = ""
    vocab: dict[str, int] | list[tuple[str, float]] = msgspec.field(default_factory=dict)
    byte_fallback: bool = False


class _AddedToken(msgspec.Struct):
    content: str
    lstrip: bool
    rstrip: bool


class _Parts(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken]
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None


def longest_token(tokenizer: Tokenizer) -> int:
    """Return the most bytes of UTF-8 text that one token can stand for; 0 where there may be no limit, because the
    tokenizer can drop text or replace it by an unknown token."""
    try:
        parts = msgspec.json.decode(tokenizer.to_str(), type=_Parts)
    except msgspec.MsgspecError:
        return 0
    vocabulary = list(parts.model.vocab if isinstance(parts.model.vocab, dict) else dict(parts.model.vocab))
    steps = [*_steps(parts.normalizer), *_steps(parts.pre_tokenizer)]
    byte_level = any(step.get("type") == "ByteLevel" for step in steps)
    alphabet = BYTE_LEVEL_ALPHABET if byte_level else BYTE_TOKENS if parts.model.byte_fallback else None
    if alphabet is None or not alphabet.issubset(vocabulary) or parts.model.type not in ("BPE", "Unigram"):
        return 0
    if any(token.lstrip or token.rstrip for token in parts.added_tokens):
        return 0
    shrinks = [_shrinks(step) for step in _steps(parts.normalizer)]
    if None in shrinks or not all(_keeps_text(step) for step in _steps(parts.pre_tokenizer)):
        return 0
    # In the byte-level alphabet each character is a byte.
    longest = max(len(token) if byte_level else len(token.encode()) for token in vocabulary)
    longest = max([longest, *(len(token.content.encode()) for token in parts.added_tokens)])
    return longest * max((factor for factor in shrinks if factor is not None), default=1)


def _steps(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer, which may be a sequence."""
    if part is None:
        return
    if part.get("type") != "Sequence":
        yield part
    for name in ("normalizers", "pretokenizers"):
        for step in part.get(name, ()):
            yield from _steps(step)


def _shrinks(normalizer: Mapping[str, Any]) -> int | None:
    """Return the most bytes that the normalizer makes one byte of; None: no limit is known."""
    match normalizer:
        case {"type": "NFC"}:
            return _COMPOSITION
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
            return 1 if len(content.encode()) >= len(pattern.encode()) else None
    return 1 if normalizer.get("type") in _KEEP_LENGTH else None


def _keeps_text(pre_tokenizer: Mapping[str, Any]) -> bool:
    if (behavior := pre_tokenizer.get("behavior")) is not None:
        return bool(behavior != "Removed")
    return pre_tokenizer.get("type") in _KEEP_TEXT
