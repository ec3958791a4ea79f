"""The output of one response: from deltas to items, with the events that they cause.

The items of a stream and those of the whole response come from here alike, so they agree in identifiers and indices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from minisgl.frontend.generation.functions import are_complete
from minisgl.frontend.openai.logprobs import chat_logprobs
from minisgl.frontend.responses.output_items import (
    CustomToolCall,
    Event,
    FunctionCall,
    Item,
    Message,
    OpenItem,
    Place,
    Reasoning,
    Status,
)
from minisgl.frontend.responses.text_scores import TextScores
from minisgl.frontend.responses.tools import ToolNames
from minisgl.frontend.server.response_stream import Delta
from minisgl.wire.text import Finished, ToolCallDelta

T = TypeVar("T", bound=OpenItem)


class OutputOptions(msgspec.Struct, frozen=True):
    tools: ToolNames = ToolNames()
    scored: bool = False
    """Text carries log-probabilities."""
    sealed_reasoning: bool = False
    """Reasoning carries `encrypted_content`."""
    summarized_reasoning: bool = False
    """Reasoning has a summary, which is the reasoning itself."""


class Output:
    """Items in the order of the output, of which the last one may be open."""

    def __init__(self, options: OutputOptions, response_id: str) -> None:
        self._options = options
        self._response_id = response_id
        self._complete: list[Item] = []
        self._open: OpenItem | None = None
        self._scores = TextScores()
        self._open_call = -1
        """Number of the open call."""
        self._arguments: list[str] = []
        """Arguments of the last call, in pieces."""

    def items(self) -> list[Item]:
        """Return all items; one that is open counts as cut off."""
        cut_off = [] if self._open is None else [self._open.item("incomplete")]
        return self._complete + cut_off

    def add(self, delta: Delta) -> list[Event]:
        """Take new output. At its end, the last item is complete, or incomplete if a limit was reached or a stop string
        has cut off a call."""
        events: list[Event] = []
        if self._options.scored:
            self._scores.add(delta.scored)
        if delta.reasoning:
            self._scores.skip(delta.reasoning)
            reasoning = self._open if isinstance(self._open, Reasoning) else self._start("rs", self._reasoning, events)
            events += reasoning.push(delta.reasoning)
        if delta.text:
            scored = self._scores.take(delta.text, is_first=not isinstance(self._open, Message))
            message = self._open if isinstance(self._open, Message) else self._start("msg", Message, events)
            events += message.push(delta.text, chat_logprobs(scored)["content"])
        for call in delta.tool_calls:
            self._add_call(call, events)
        if delta.finished is not None:
            self._end(delta.finished, events)
        return events

    def _add_call(self, piece: ToolCallDelta, events: list[Event]) -> None:
        if piece.index != self._open_call:
            tool = self._options.tools.find(piece.name)
            kind, prefix = (CustomToolCall, "ctc") if tool.is_custom else (FunctionCall, "fc")
            self._start(prefix, lambda place: kind(place, piece.id, tool), events)
            self._open_call = piece.index
            self._arguments = []
        self._arguments.append(piece.arguments)
        assert isinstance(self._open, FunctionCall | CustomToolCall)
        events += self._open.push(piece.arguments)

    def _reasoning(self, place: Place) -> Reasoning:
        return Reasoning(place, self._options.sealed_reasoning, self._options.summarized_reasoning)

    def _end(self, finished: Finished, events: list[Event]) -> None:
        if finished.reason == "length" or (finished.matched_stop is not None and self._is_cut_call()):
            self._close("incomplete", events)
            return
        if self._open is None or (isinstance(self._open, Reasoning) and not self._complete):
            # Clients look for a message or a call in every complete response.
            self._start("msg", Message, events)
        self._close("completed", events)

    def _is_cut_call(self) -> bool:
        is_call = isinstance(self._open, FunctionCall | CustomToolCall)
        return is_call and not are_complete("".join(self._arguments))

    def _start(self, prefix: str, make: Callable[[Place], T], events: list[Event]) -> T:
        """Open an item behind the last one, which is complete then."""
        self._close("completed", events)
        index = len(self._complete)
        place = Place(f"{prefix}_{self._response_id}_{index}", index)
        item = make(place)
        events.append(place.item_event("response.output_item.added", item.item("in_progress")))
        events += item.opening()
        self._open = item
        return item

    def _close(self, status: Status, events: list[Event]) -> None:
        if self._open is None:
            return
        events += self._open.closing()
        item = self._open.item(status)
        events.append(self._open.place.item_event("response.output_item.done", item))
        self._complete.append(item)
        self._open = None
        self._open_call = -1
