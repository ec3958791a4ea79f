"""Checks of grammars by the library, with a vocabulary of single bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Final

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from minisgl.grammar.limits import LIMITS, code_of, deep_threads, first_line, is_dead_end

NOTHING_ALLOWED: Final = "no text satisfies the grammar"

_NEEDS_TOKENS: Final = re.compile("unknown special token|token range")
_TOKEN_ID: Final = re.compile(r"<\[\d+\]>")
_LONG: Final = 192 << 10
"""Characters. Schemas of tools are within the limits alone; shorter grammars seldom exceed them together. Those of 128
usual tools have a third, and would take a twentieth of a second more until their first token."""
_KEPT: Final = 32
"""Long grammars that are remembered, of up to some megabytes each: agents send the same tools with each request."""
_BYTES: Final = 256
_END: Final = _BYTES
_WORDS: Final = (_BYTES + 32) // 32


def problem_of(grammar: str) -> str:
    """Return the first line of the library's error about the text of a grammar, or an empty text. Grammars that name
    special tokens are only checked as far as that is possible without those tokens."""
    return deep_threads.submit(_problem, grammar).result()


def is_too_large(grammar: str) -> bool:
    """Return whether a long grammar exceeds a limit of the library, which takes up to a quarter of a second. Its
    special tokens may be those of any vocabulary."""
    return len(grammar) >= _LONG and _exceeds_limits(grammar)


def matches_nothing(grammar: str) -> bool:
    """Return whether a grammar allows not even the beginning of a text. False for one that cannot be compiled."""
    return deep_threads.submit(_matches_nothing, grammar).result()


@lru_cache(_KEPT)
def _exceeds_limits(grammar: str) -> bool:
    problem = problem_of(_TOKEN_ID.sub(f"<[{_END}]>", grammar))
    return code_of(problem, "") == "grammar_too_complex"


def matching(grammar: str, texts: Sequence[str]) -> list[bool]:
    """Return whether each of the texts satisfies the grammar."""
    return deep_threads.submit(_matching, grammar, texts).result()


def begins(grammar: str, text: str) -> bool:
    """Return whether a text that satisfies the grammar begins with another one."""
    return deep_threads.submit(_begins, grammar, text).result()


def _matching(grammar: str, texts: Sequence[str]) -> list[bool]:
    start = _matcher(grammar)
    return [
        (matcher := start.deep_copy()).consume_tokens(list(text.encode())) and matcher.is_accepting() for text in texts
    ]


def _matches_nothing(grammar: str) -> bool:
    matcher = _matcher(grammar)
    return not matcher.is_error() and _is_dead(matcher)


def _begins(grammar: str, text: str) -> bool:
    matcher = _matcher(grammar)
    return matcher.consume_tokens(list(text.encode())) and not _is_dead(matcher)


def _is_dead(matcher: LLMatcher) -> bool:
    """Whether no token may come next, not even the end."""
    mask = np.zeros(_WORDS, np.int32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return matcher.is_error() or not mask.any()


def _problem(grammar: str) -> str:
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    if is_error:
        return first_line(messages[0])
    matcher = _matcher(grammar)
    if matcher.is_error():
        problem = matcher.get_error()
        return "" if _NEEDS_TOKENS.search(problem) else first_line(problem)
    if _is_dead(matcher):
        problem = first_line(matcher.get_error())
        return NOTHING_ALLOWED if not problem or is_dead_end(problem) else problem
    return ""


def _matcher(grammar: str) -> LLMatcher:
    return LLMatcher(_bytes(), grammar, log_level=0, limits=LIMITS)


@cache
def _bytes() -> LLTokenizer:
    """Return a tokenizer with a token for each byte, and one that ends an answer."""
    end = {"id": _END, "content": "<end>", "special": True, "normalized": False}
    return LLTokenizer(
        msgspec.json.encode(
            {
                "version": "1.0",
                "added_tokens": [{**end, "single_word": False, "lstrip": False, "rstrip": False}],
                "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
                "model": {
                    "type": "BPE",
                    "byte_fallback": True,
                    "vocab": {f"<0x{byte:02X}>": byte for byte in range(_BYTES)},
                    "merges": [],
                },
            }
        ).decode(),
        eos_token=_END,
    )
