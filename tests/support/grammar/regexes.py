"""Random regular expressions that Python's `re` understands in the same way."""

from __future__ import annotations

import random
from typing import Final

_ATOMS: Final = (
    *("a", "b", "xyz", "é", "日本", " ", "-", "/", '"', "{", "}", "]", "@", "#", "&&", "~~", "%", "'", "<", ":", ","),
    *(r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", r"\.", r"\\", r"\(", r"\[", r"\n", r"\t", r"\x41", r"\u00e9", r"\-"),
    *("[abc]", "[a-z0-9]", "[^a-z]", r"[\d.]", r"[^\d\s]", r"[\w-]", "[a&&b]", "[[a]", "[+--]", r"[^\W_]", r"[\]\[]"),
    ".",
)
_REPEATS: Final = ("*", "+", "?", "{2}", "{1,3}", "{0,}", "*?", "+?", "{2,3}?")


def random_regex(rng: random.Random, depth: int = 3) -> str:
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(_ATOMS)
    match rng.randrange(5):
        case 0:
            return "|".join(random_regex(rng, depth - 1) for _ in range(rng.randint(2, 3)))
        case 1:
            return f"({random_regex(rng, depth - 1)}){rng.choice(_REPEATS)}"
        case 2:
            return f"(?:{random_regex(rng, depth - 1)}){rng.choice(('', '', *_REPEATS))}"
        case _:
            return "".join(f"(?:{random_regex(rng, depth - 1)})" for _ in range(rng.randint(1, 3)))
