"""The bytes that each token adds to a text.

To decode token by token with a tokenizer's own `decode`, one must decode a window of tokens at every step, and guess
from replacement characters whether a character is complete. With the bytes of each token, the incremental UTF-8 decoder
of the standard library does the rest.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte for each printable character that replaces it in byte-level BPE (Radford et al., GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_ALPHABET: Final = _byte_level_alphabet()
BYTE_LEVEL_ALPHABET: Final = frozenset(_ALPHABET)
"""Tokens of single bytes in byte-level BPE."""
BYTE_TOKENS: Final = frozenset(f"<0x{byte:02X}>" for byte in range(256))
"""Tokens of single bytes in vocabularies of characters that fall back to bytes."""


class TokenBytes:
    """Bytes by token id, computed when a token is first used."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        decoders = _decoder_types(msgspec.json.decode(tokenizer.to_str()).get("decoder"))
        self._byte_level = "ByteLevel" in decoders
        self._byte_fallback = "ByteFallback" in decoders
        # Tokens are decoded behind this one, because some decoders strip the space at the beginning of a text.
        self._anchor = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._anchor_text = tokenizer.decode(self._anchor)
        self._cache: dict[int, bytes] = dict.fromkeys(self._special, b"")
        self._texts: dict[int, str | None] = {}

    def is_special(self, token: int) -> bool:
        """True for special tokens, which have no text."""
        return token in self._special

    def bytes_inside(self, token: int) -> bytes:
        """Return the bytes that the token adds within a text; none for special tokens and unknown ids."""
        known = self._cache.get(token)
        if known is None:
            known = self._cache[token] = self._compute(token)
        return known

    def text(self, token: int) -> str | None:
        """Return the same as text; None where the bytes alone are not valid UTF-8."""
        try:
            return self._texts[token]
        except KeyError:
            text = self._texts[token] = _decoded(self.bytes_inside(token))
            return text

    def name(self, token: int) -> bytes:
        """Return the name of the token in a list of tokens: its bytes, or the text of a special token."""
        if token in self._special:
            return (self._tokenizer.id_to_token(token) or "").encode()
        return self.bytes_inside(token)

    def bytes_at_start(self, token: int) -> bytes:
        """Return the bytes that the token adds at the beginning of a text, where some decoders drop one space."""
        inside = self.bytes_inside(token)
        if inside.startswith(b" ") and self._tokenizer.decode([token]) == inside[1:].decode("utf-8", "replace"):
            return inside[1:]
        return inside

    def _compute(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token) if token >= 0 else None
        if text is None:
            return b""
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(match[1], 16)])
        if self._byte_level:
            try:
                return bytes(_ALPHABET[character] for character in text)
            except KeyError:
                # An added token, which stands for its own text.
                return text.encode()
        decoded = self._tokenizer.decode([*self._anchor, token])
        return decoded.removeprefix(self._anchor_text).encode()


def added_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return ids by text of the tokens that a vocabulary has besides those of its algorithm."""
    return {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}


def _decoded(text: bytes) -> str | None:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return None


def _decoder_types(decoder: Any) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    nested = (_decoder_types(part) for part in decoder.get("decoders", ()))
    return {str(decoder.get("type"))}.union(*nested)
