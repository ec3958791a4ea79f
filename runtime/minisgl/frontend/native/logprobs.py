"""Log-probabilities in `meta_info` of /generate: lists of [log-probability, token id, text or null]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from minisgl.frontend.generation.response_format import finite
from minisgl.wire.text import ScoredToken

Entry = tuple[float | None, int, str | None]


def token_logprobs(tokens: Sequence[ScoredToken], texts: bool) -> list[Entry]:
    """Return an entry for each token; `texts`: with its text."""
    return [(finite(token.logprob), token.token_id, _text(token.name) if texts else None) for token in tokens]


def top_logprobs(tokens: Sequence[ScoredToken], texts: bool) -> list[list[Entry] | None]:
    """Return the most likely tokens at the position of each token, best first; None where there are none."""
    return [
        [
            (finite(logprob), token_id, _text(name) if texts else None)
            for (name, logprob), token_id in zip(token.top, token.top_ids, strict=True)
        ]
        or None
        for token in tokens
    ]


class Lists:
    """Lists of one choice, which grow with its output. Each token is converted once, although every event of a stream
    has the whole lists."""

    def __init__(self, tops: str, texts: bool) -> None:
        """`tops`: part of the names of the fields with the other tokens that are reported; empty: there are none."""
        self._tops = tops
        self._texts = texts
        self.fields: dict[str, Any] = {}
        """Fields of `meta_info`."""
        for side in ("input", "output"):
            self.fields[f"{side}_token_logprobs"] = []
            if tops:
                self.fields[f"{side}_{tops}_logprobs"] = []

    def add(self, side: Literal["input", "output"], tokens: Sequence[ScoredToken]) -> None:
        self.fields[f"{side}_token_logprobs"] += token_logprobs(tokens, self._texts)
        if self._tops:
            self.fields[f"{side}_{self._tops}_logprobs"] += top_logprobs(tokens, self._texts)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "replace")
