"""Hypothesis strategies for JSON in a field of a body: arbitrary values, and typical ones."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

_KEYS = st.sampled_from(["type", "role", "content", "text", "1", "include_usage", "function", "name", "arguments"])
_WORDS = st.sampled_from(["", "text", "none", "auto", "user", "tool", "assistant", "json_object", "default", "1"])


def json_values(floats: st.SearchStrategy[float]) -> st.SearchStrategy[Any]:
    scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.integers(-1, 5) | floats
    return st.recursive(
        scalars | st.text(max_size=5) | _WORDS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4),
        max_leaves=8,
    )
