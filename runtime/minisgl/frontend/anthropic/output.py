"""The content of one message: from deltas to blocks, with the events that they cause.

The blocks of a stream and those of the whole message come from here alike. The use of a tool is held until its
arguments are whole: clients read them only if they are the JSON of an object, and run the tool with those that they
could read.
"""

from __future__ import annotations

from typing import Any

import msgspec

from minisgl.frontend.generation.functions import are_object
from minisgl.frontend.generation.sealed_reasoning import seal
from minisgl.frontend.server.response_stream import Delta
from minisgl.wire.text import Finished, ToolCallDelta

Event = dict[str, Any]


class Content:
    """Blocks in their order, of which the last one may be open."""

    def __init__(self, thinking_omitted: bool) -> None:
        """`thinking_omitted`: thinking is only in the signature of its block, which the client sends back."""
        self._thinking_omitted = thinking_omitted
        self._complete: list[dict[str, Any]] = []
        self._open: _Block | None = None

    @property
    def has_tool_use(self) -> bool:
        return any(block["type"] == "tool_use" for block in self._complete)

    def blocks(self) -> list[dict[str, Any]]:
        """Return all complete blocks."""
        return self._complete

    def add(self, delta: Delta) -> list[Event]:
        """Take new output. At its end, the last block is complete."""
        events: list[Event] = []
        if delta.reasoning:
            self._push(_Block("thinking"), delta.reasoning, events)
        if delta.text:
            self._push(_Block("text"), delta.text, events)
        for call in delta.tool_calls:
            self._push(_Block("tool_use", call), call.arguments, events)
        if delta.finished is not None:
            self._close(events, delta.finished)
        return events

    def _push(self, block: _Block, piece: str, events: list[Event]) -> None:
        """Add a piece to the open block if it is the same as `block`, otherwise to `block`, which is opened."""
        if self._open is None or not self._open.continues_with(block):
            self._close(events)
            self._open = block
            if block.call is None:
                events.append(self._event("content_block_start", content_block=block.opening()))
        self._open.pieces.append(piece)
        if self._open.call is None and not (self._open.kind == "thinking" and self._thinking_omitted):
            events.append(self._event("content_block_delta", delta=self._open.delta(piece)))

    def _close(self, events: list[Event], end: Finished | None = None) -> None:
        """Complete the open block. `end`: that of the answer, which may have cut the block off."""
        block, self._open = self._open, None
        if block is None:
            return
        text = "".join(block.pieces)
        if block.kind == "thinking":
            # Clients send a block back only with a signature.
            signature = seal(text if self._thinking_omitted else "")
            delta = {"type": "signature_delta", "signature": signature}
            events.append(self._event("content_block_delta", delta=delta))
            thinking = "" if self._thinking_omitted else text
            complete = {"type": "thinking", "thinking": thinking, "signature": signature}
        elif block.call is None:
            complete = {"type": "text", "text": text}
        elif are_object(text):
            events.append(self._event("content_block_start", content_block=block.opening()))
            events += [self._event("content_block_delta", delta=block.delta(piece)) for piece in block.pieces if piece]
            complete = block.opening() | {"input": msgspec.Raw(text.encode())}
        elif end is not None and (end.reason == "length" or isinstance(end.matched_stop, str)):
            # No client must act on half of the arguments.
            return
        else:
            # The model has written no call that could be run as it is.
            name = msgspec.json.encode(block.call.name).decode()
            self._push(_Block("text"), f'{{"name": {name}, "arguments": {text}}}', events)
            self._close(events)
            return
        events.append(self._event("content_block_stop"))
        self._complete.append(complete)

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "index": len(self._complete), **fields}


class _Block:
    """A block that grows."""

    def __init__(self, kind: str, call: ToolCallDelta | None = None) -> None:
        self.kind = kind
        self.call = call
        """The beginning of the call, for the use of a tool."""
        self.pieces: list[str] = []

    def continues_with(self, other: _Block) -> bool:
        index = None if self.call is None else self.call.index
        return self.kind == other.kind and index == (None if other.call is None else other.call.index)

    def opening(self) -> dict[str, Any]:
        if self.call is not None:
            return {"type": "tool_use", "id": self.call.id, "name": self.call.name, "input": {}}
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "text", "text": ""}

    def delta(self, piece: str) -> dict[str, Any]:
        if self.call is not None:
            return {"type": "input_json_delta", "partial_json": piece}
        return {"type": f"{self.kind}_delta", self.kind: piece}
