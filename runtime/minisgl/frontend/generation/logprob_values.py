"""Log-probabilities as JSON numbers."""

from __future__ import annotations

from typing import Final

LOWEST: Final = -9999.0
"""Stands for minus infinity, which JSON does not have, as in OpenAI's API: a token that cannot be sampled."""


def finite(logprob: float | None) -> float | None:
    """Return the value, at least LOWEST; None for the first token of a prompt, which has none."""
    return None if logprob is None else max(logprob, LOWEST)
