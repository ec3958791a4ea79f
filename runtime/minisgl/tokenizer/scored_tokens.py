"""Log-probabilities of tokens, in step with the text that they make.

Text is held back while it could become a stop string, and a token must not be reported before its text is: it may
turn out to lie behind the end of the answer.
"""

from __future__ import annotations

import codecs
from array import array
from collections import deque

import msgspec
import numpy as np
from numpy.typing import NDArray

from minisgl.tokenizer.token_bytes import TokenBytes
from minisgl.wire.messages import TokenLogprobs
from minisgl.wire.text import ScoredToken


class ScoredAnswer:
    """The tokens of one answer, from when they are sampled until their text is given."""

    def __init__(self, table: TokenBytes, offset: int) -> None:
        """`offset`: characters before the answer, those of an echoed prompt."""
        self._table = table
        self._sampled = self._given = offset
        self._held: deque[ScoredToken] = deque()

    def add(self, token: int, added: bytes, scores: TokenLogprobs) -> None:
        """A token that adds these bytes. Raises ValidationError when there are no scores of one token."""
        logprobs, tops = unpack(self._table, scores, 1)
        self._held.append(ScoredToken(self._table.name(token), added, self._sampled, logprobs[0], tops[0]))

    def sampled(self, characters: int) -> None:
        """The text of all tokens so far has grown by this."""
        self._sampled += characters

    def give(self, characters: int, *, whole: bool = False) -> list[ScoredToken]:
        """So many more characters of the answer are given; `whole`: the last of what was sampled. The tokens that
        begin in what has been given."""
        self._given += characters
        given = []
        while self._held and (whole or self._held[0].offset < self._given):
            given.append(self._held.popleft())
        return given


class EchoedPrompt:
    """The text of a prompt, and where in it each of its tokens is."""

    def __init__(self, table: TokenBytes, prompt: array[int], text: str | None) -> None:
        """`text`: what the client wrote; None: it sent tokens."""
        self._table = table
        self._tokens = prompt
        self._added: list[bytes] = []
        self._offsets: list[int] = []
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        pieces: list[str] = []
        length = 0
        for token in prompt:
            name = table.name(token)
            # A special token that the tokenizer put there by itself is no part of what the client wrote.
            written = not table.is_special(token) or text is None or text.startswith(name.decode(), length)
            added = (name if any(self._added) else table.at_start(token) or name) if written else b""
            self._added.append(added)
            self._offsets.append(length if text is None else min(length, len(text)))
            pieces.append(utf8.decode(added))
            length += len(pieces[-1])
        pieces.append(utf8.decode(b"", True))
        self.text = "".join(pieces) if text is None else text
        self._next = 0

    @property
    def missing(self) -> int:
        """Tokens whose scores have not come yet."""
        return len(self._tokens) - self._next

    def first(self) -> list[ScoredToken]:
        """The first token, which has no log-probability."""
        self._next = 1
        return [self._scored(0, None, [])]

    def scored(self, start: int, scores: TokenLogprobs) -> list[ScoredToken]:
        """The tokens from `start` on. Raises ValidationError for scores that do not fit."""
        count = len(scores.chosen) // 4
        if start != self._next or count > self.missing:
            raise msgspec.ValidationError("the scores of a prompt came out of order")
        self._next += count
        logprobs, tops = unpack(self._table, scores, count)
        return [self._scored(start + n, logprobs[n], tops[n]) for n in range(count)]

    def _scored(self, at: int, logprob: float | None, top: list[tuple[bytes, float]]) -> ScoredToken:
        return ScoredToken(self._table.name(self._tokens[at]), self._added[at], self._offsets[at], logprob, top)


def unpack(table: TokenBytes, scores: TokenLogprobs, count: int) -> tuple[list[float], list[list[tuple[bytes, float]]]]:
    """Of each of `count` tokens: its log-probability, and the likeliest names with theirs."""
    chosen = np.frombuffer(scores.chosen, "<f4")
    if len(chosen) != count or len(scores.top) != len(scores.top_ids) or (count and len(scores.top) % (4 * count)):
        raise msgspec.ValidationError("the columns of log-probabilities differ in length")
    ids: NDArray[np.int32] = np.frombuffer(scores.top_ids, "<i4").reshape(count, -1) if count else np.empty((0, 0), "i")
    top = np.frombuffer(scores.top, "<f4").reshape(ids.shape)
    return chosen.tolist(), [
        [(table.name(token), logprob) for token, logprob in zip(tokens, values, strict=True)]
        for tokens, values in zip(ids.tolist(), top.tolist(), strict=True)
    ]
