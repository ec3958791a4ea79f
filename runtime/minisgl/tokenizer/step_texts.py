"""Collects the output of one step for all requests of a worker in one message."""

from __future__ import annotations

from array import array

from minisgl.parsing.output import Reasoning, Text
from minisgl.tokenizer.answer import Output
from minisgl.wire.text import Finished, FirstTokenFrom, ScoredToken, Texts, ToolCallDelta


class StepTexts:
    """Columns of one `Texts` message."""

    def __init__(self) -> None:
        self._ids: list[bytes] = []
        self._texts: list[str] = []
        self._counts: list[int] = []
        self._scored: dict[int, list[ScoredToken]] = {}
        self._token_ids: dict[int, bytes] = {}
        self._reasoning: dict[int, str] = {}
        self._tool_calls: dict[int, list[ToolCallDelta]] = {}
        self._finished: list[Finished] = []
        self.first_tokens: dict[bytes, FirstTokenFrom] = {}

    def add_text(self, request_id: bytes, text: str, tokens: int) -> None:
        """Add a row with text alone. `tokens` is the number of tokens that the request has sampled so far."""
        self._ids.append(request_id)
        self._texts.append(text)
        self._counts.append(tokens)

    def add(self, request_id: bytes, output: Output, tokens: int) -> bool:
        """Add this output, if there is any. Returns whether there is. It takes several rows only where one row, which
        has reasoning, then text, then tool calls, cannot keep its order."""
        if not output.events and not output.scored and not output.token_ids:
            return False
        row = len(self._ids)
        self.add_text(request_id, "", tokens)
        if output.token_ids:
            self._token_ids[row] = array("i", output.token_ids).tobytes()
        if output.scored:
            self._scored[row] = [*output.scored]
        for event in output.events:
            has_calls = row in self._tool_calls
            match event:
                case Reasoning():
                    if has_calls or self._texts[row]:
                        row = len(self._ids)
                        self.add_text(request_id, "", tokens)
                    self._reasoning[row] = self._reasoning.get(row, "") + event.text
                case Text() if has_calls:
                    row = len(self._ids)
                    self.add_text(request_id, event.text, tokens)
                case Text():
                    self._texts[row] += event.text
                case ToolCallDelta():
                    self._tool_calls.setdefault(row, []).append(event)
        return True

    def finish(self, finished: Finished) -> None:
        """Add the end of an answer."""
        self._finished.append(finished)

    def message(self) -> Texts | None:
        """Return the message; None if nothing was added."""
        if not self._ids and not self._finished and not self.first_tokens:
            return None
        return Texts(
            ids=b"".join(self._ids),
            texts=self._texts,
            finished=self._finished,
            counts=self._counts,
            scored=self._scored,
            token_ids=self._token_ids,
            reasoning=self._reasoning,
            tool_calls=self._tool_calls,
            first_tokens=self.first_tokens,
        )
