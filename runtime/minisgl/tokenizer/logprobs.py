"""Log-probabilities of tokens, in step with the text that they make.

Text is held back while it could become a stop string. A token must not be reported before its text, because it may turn
out to be behind the end of the answer.
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


class AnswerLogprobs:
    """Tokens of one answer with their log-probabilities, from sampling until their text is delivered."""

    def __init__(self, table: TokenBytes, offset: int) -> None:
        """`offset` is the number of characters before the answer, those of an echoed prompt."""
        self._table = table
        self._sampled = self._delivered = offset
        self._held: deque[ScoredToken] = deque()

    def add(self, token: int, added: bytes, scores: TokenLogprobs) -> None:
        """Add a token that adds these bytes. Raises ValidationError unless the scores are those of one token."""
        ((logprob, top, top_ids),) = unpack(self._table, scores, 1)
        name = self._table.name(token)
        self._held.append(ScoredToken(name, added, self._sampled, logprob, top, token, top_ids))

    def sampled(self, characters: int) -> None:
        """Count the characters by which the text of all tokens has grown."""
        self._sampled += characters

    def deliver(self, characters: int, *, whole: bool = False) -> list[ScoredToken]:
        """Count characters of the answer that are delivered now, with `whole` all that were sampled. Returns the tokens
        that begin in the delivered text."""
        self._delivered += characters
        delivered = []
        while self._held and (whole or self._held[0].offset < self._delivered):
            delivered.append(self._held.popleft())
        return delivered


class EchoLogprobs:
    """Text of an echoed prompt, with the offset and the log-probability of each of its tokens."""

    def __init__(self, table: TokenBytes, prompt: array[int], text: str | None) -> None:
        """`text` is the client's prompt; None if it sent token ids."""
        self._table = table
        self._tokens = prompt
        self._added: list[bytes] = []
        self._offsets: list[int] = []
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        pieces: list[str] = []
        length = 0
        for token in prompt:
            name = table.name(token)
            # A special token that the tokenizer has added is not part of the client's prompt.
            written = not table.is_special(token) or text is None or text.startswith(name.decode(), length)
            added = (name if any(self._added) else table.bytes_at_start(token) or name) if written else b""
            self._added.append(added)
            self._offsets.append(length if text is None else min(length, len(text)))
            pieces.append(utf8.decode(added))
            length += len(pieces[-1])
        pieces.append(utf8.decode(b"", True))
        self.text = "".join(pieces) if text is None else text
        self._next = 0

    @property
    def missing(self) -> int:
        """Number of tokens whose scores have not arrived."""
        return len(self._tokens) - self._next

    def first(self) -> list[ScoredToken]:
        """Return the first token, which has no log-probability."""
        self._next = 1
        return [self._scored(0, None, [], [])]

    def scored(self, start: int, scores: TokenLogprobs) -> list[ScoredToken]:
        """Return the next tokens among those from `start` on; another engine scores the prompt from its beginning
        again. Raises ValidationError for scores that do not fit."""
        count = len(scores.chosen) // 4
        first, end = self._next, start + count
        if not 1 <= start <= first or end > len(self._tokens):
            raise msgspec.ValidationError("the scores of a prompt are out of order")
        new = unpack(self._table, scores, count)[first - start :]
        self._next = max(first, end)
        return [self._scored(at, *unpacked) for at, unpacked in enumerate(new, first)]

    def _scored(
        self, at: int, logprob: float | None, top: list[tuple[bytes, float]], top_ids: list[int]
    ) -> ScoredToken:
        token = self._tokens[at]
        return ScoredToken(self._table.name(token), self._added[at], self._offsets[at], logprob, top, token, top_ids)


def unpack(
    table: TokenBytes, scores: TokenLogprobs, count: int
) -> list[tuple[float, list[tuple[bytes, float]], list[int]]]:
    """Return for each of `count` tokens its log-probability, and names, log-probabilities and ids of the most likely
    ones. Raises ValidationError where lengths differ."""
    # In bytes: numpy would raise another exception for a column that is not a whole number of values.
    size = 4 * count
    has_rows = not len(scores.top) % size if size else not scores.top
    if len(scores.chosen) != size or len(scores.top) != len(scores.top_ids) or not has_rows:
        raise msgspec.ValidationError("the columns of log-probabilities differ in length")
    chosen = np.frombuffer(scores.chosen, "<f4")
    ids: NDArray[np.int32] = np.frombuffer(scores.top_ids, "<i4").reshape(count, -1) if count else np.empty((0, 0), "i")
    top = np.frombuffer(scores.top, "<f4").reshape(ids.shape)
    return [
        (logprob, [(table.name(token), value) for token, value in zip(tokens, values, strict=True)], tokens)
        for logprob, tokens, values in zip(chosen.tolist(), ids.tolist(), top.tolist(), strict=True)
    ]
