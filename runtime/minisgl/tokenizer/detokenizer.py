"""Token ids to text, one token at a time, never splitting a character."""

from __future__ import annotations

from collections.abc import Iterable
from encodings.utf_8 import IncrementalDecoder

from minisgl.tokenizer.token_bytes import TokenBytes


class Detokenizer:
    """Text of one answer. All pieces together equal a full decode of its tokens behind their prompt, without special
    tokens. Bytes that are not UTF-8 become U+FFFD; an incomplete character is held back until it is complete or the
    answer ends.

    With byte fallback, where a checkpoint has tokens for single bytes, one bad byte makes the tokenizer library replace
    all its neighbours with U+FFFD, good characters too. Here those stay: they may have been sent already.
    """

    def __init__(self, tokens: TokenBytes, prompt: Iterable[int], skip_special: bool = True) -> None:
        """`prompt` holds the token ids of the prompt. Behind a prompt without any text, the answer begins a text; with
        special tokens in texts, that is no prompt."""
        self._tokens = tokens
        self._skip_special = skip_special
        self._at_start = skip_special and all(tokens.is_special(token) for token in prompt)
        self._utf8 = IncrementalDecoder("replace")

    def step(self, token: int) -> str:
        """Return the text that this token completes; often the token's own, sometimes empty."""
        # Most tokens are whole characters behind whole characters, and have the same text each time: a look-up takes
        # 1 µs less than the decoder.
        if (
            not self._at_start
            and not self._utf8.buffer
            and self._skip_special
            and (text := self._tokens.text(token)) is not None
        ):
            return text
        return self.step_bytes(token)[0]

    def step_bytes(self, token: int) -> tuple[str, bytes]:
        """Return the text that this token completes, and the bytes that the token itself adds."""
        if not self._skip_special and self._tokens.is_special(token):
            added = self._tokens.name(token)
        elif self._at_start and not self._tokens.is_special(token):
            self._at_start = False
            added = self._tokens.bytes_at_start(token)
        else:
            added = self._tokens.bytes_inside(token)
        return self._utf8.decode(added), added

    def finish(self) -> str:
        """Return U+FFFD for a character that was never completed, else nothing."""
        return self._utf8.decode(b"", True)
