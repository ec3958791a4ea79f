"""Token ids to text, one token at a time, never splitting a character."""

from __future__ import annotations

from collections.abc import Iterable
from encodings.utf_8 import IncrementalDecoder

from minisgl.tokenizer.token_bytes import TokenBytes


class Detokenizer:
    """One answer. All its pieces together equal a full decode of its tokens behind their prompt, special tokens
    skipped. Bytes that are not UTF-8 become U+FFFD; those of a character that has only begun are held back until it is
    complete or `finish` gives up on it.

    Where a checkpoint spells single bytes as tokens (byte fallback), one bad byte makes the tokenizer library replace
    all its neighbours with U+FFFD, good characters too. Here they stay: they may have been sent already.
    """

    def __init__(self, tokens: TokenBytes, prompt: Iterable[int]) -> None:
        """`prompt`: its token ids. An answer behind a prompt without any text begins a text."""
        self._tokens = tokens
        self._at_start = all(tokens.is_special(token) for token in prompt)
        self._utf8 = IncrementalDecoder("replace")

    def step(self, token: int) -> str:
        """The text that is complete with this token; often one token's, sometimes empty."""
        # Most tokens are whole characters behind whole characters, and the same text each time: to look it up takes
        # 1 µs less than the decoder.
        if not self._at_start and not self._utf8.buffer and (text := self._tokens.text(token)) is not None:
            return text
        return self.step_bytes(token)[0]

    def step_bytes(self, token: int) -> tuple[str, bytes]:
        """The same, and the bytes that the token itself adds."""
        if self._at_start and not self._tokens.is_special(token):
            self._at_start = False
            added = self._tokens.at_start(token)
        else:
            added = self._tokens.inside(token)
        return self._utf8.decode(added), added

    def finish(self) -> str:
        """What is left of a character that was never completed, as U+FFFD."""
        return self._utf8.decode(b"", True)
