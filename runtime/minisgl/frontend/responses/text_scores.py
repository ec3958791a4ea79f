"""Scored tokens of the text of an answer, picked from those of the whole answer.

Workers report the scores of all tokens, also of those that became reasoning, markers or calls. A message has only those
of its text, which is found in the bytes of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.wire.text import ScoredToken


class TextScores:
    """Tokens that belong to no text yet. Tokens arrive together with their text or before it."""

    def __init__(self) -> None:
        self._tokens: list[ScoredToken] = []

    def add(self, tokens: Sequence[ScoredToken]) -> None:
        self._tokens += tokens

    def skip(self, text: str) -> None:
        """Drop the tokens of `text`, which is reasoning, and those before it."""
        self.take(text, is_first=False)

    def take(self, text: str, *, is_first: bool) -> list[ScoredToken]:
        """Return the tokens of `text`. Tokens before it are dropped if it is the first text of a message; otherwise
        they belong to the message. Bytes that are no character are not found in the text: then all tokens are its."""
        wanted = text.encode("utf-8", "replace")
        start = b"".join(token.text for token in self._tokens).find(wanted)
        if start < 0:
            all_tokens, self._tokens = self._tokens, []
            return all_tokens
        first, end, position = 0, 0, 0
        for number, token in enumerate(self._tokens):
            if position >= start + len(wanted):
                break
            if position <= start:
                first = number
            end = number + 1
            position += len(token.text)
        taken = self._tokens[first if is_first else 0 : end]
        del self._tokens[:end]
        return taken
