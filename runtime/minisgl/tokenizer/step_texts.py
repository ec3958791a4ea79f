"""Collects the output of one step for all requests of a worker in one message."""

from __future__ import annotations

from array import array

from minisgl.tokenizer.answer import Output
from minisgl.wire.text import Finished, ScoredToken, Texts


class StepTexts:
    """Columns of one `Texts` message."""

    def __init__(self) -> None:
        self._ids: list[bytes] = []
        self._texts: list[str] = []
        self._counts: list[int] = []
        self._scored: dict[int, list[ScoredToken]] = {}
        self._token_ids: dict[int, bytes] = {}
        self._finished: list[Finished] = []

    def add_text(self, request_id: bytes, text: str, tokens: int) -> None:
        """Add a row with text alone. `tokens` is the number of tokens that the request has sampled so far."""
        self._ids.append(request_id)
        self._texts.append(text)
        self._counts.append(tokens)

    def add(self, request_id: bytes, output: Output, tokens: int) -> bool:
        """Add a row with this output, if it has any. Returns whether it has."""
        if not output.text and not output.scored and not output.token_ids:
            return False
        if output.token_ids:
            self._token_ids[len(self._ids)] = array("i", output.token_ids).tobytes()
        if output.scored:
            self._scored[len(self._ids)] = [*output.scored]
        self.add_text(request_id, output.text, tokens)
        return True

    def finish(self, finished: Finished) -> None:
        """Add the end of an answer."""
        self._finished.append(finished)

    def message(self) -> Texts | None:
        """Return the message; None if nothing was added."""
        if not self._ids and not self._finished:
            return None
        return Texts(
            ids=b"".join(self._ids),
            texts=self._texts,
            finished=self._finished,
            counts=self._counts,
            scored=self._scored,
            token_ids=self._token_ids,
        )
