"""Output items of a response while they grow: each returns the events that its output causes.

An item is opened, takes pieces, and is closed with its status. Events lack `sequence_number`, which they get when they
are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, Protocol

from minisgl.frontend.generation.sealed_reasoning import seal
from minisgl.frontend.responses.custom_input import CustomInput
from minisgl.frontend.responses.tools import ToolName

Event = dict[str, Any]
Item = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]

LOGPROBS: Final = "logprobs"


class OpenItem(Protocol):
    """An item that is not complete."""

    @property
    def place(self) -> Place: ...

    def item(self, status: Status) -> Item:
        """Return the item with all output so far."""

    def opening(self) -> list[Event]:
        """Return the events behind `response.output_item.added`."""

    def closing(self) -> list[Event]:
        """Return the events before `response.output_item.done`."""


class Place:
    """Position of an item: its identifier, and its index in the output."""

    def __init__(self, item_id: str, output_index: int) -> None:
        self.item_id = item_id
        self._output_index = output_index

    def event(self, kind: str, **fields: Any) -> Event:
        """Return an event about a part of the item."""
        return {"type": kind, "item_id": self.item_id, "output_index": self._output_index, **fields}

    def item_event(self, kind: str, item: Item) -> Event:
        """Return an event about the whole item."""
        return {"type": kind, "output_index": self._output_index, "item": item}


class Message:
    """Text of the answer."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._texts: list[str] = []
        self._logprobs: list[Any] = []

    def item(self, status: Status) -> Item:
        content = [] if status == "in_progress" else [self._part("".join(self._texts))]
        return {
            "id": self.place.item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def opening(self) -> list[Event]:
        return [self.place.event("response.content_part.added", content_index=0, part=_text_part("", []))]

    def push(self, text: str, logprobs: Sequence[Any]) -> list[Event]:
        self._texts.append(text)
        self._logprobs += logprobs
        return [self.place.event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)]

    def closing(self) -> list[Event]:
        text = "".join(self._texts)
        return [
            self.place.event("response.output_text.done", content_index=0, text=text, logprobs=self._logprobs),
            self.place.event("response.content_part.done", content_index=0, part=self._part(text)),
        ]

    def _part(self, text: str) -> dict[str, Any]:
        return _text_part(text, self._logprobs)


class Reasoning:
    """Reasoning before the answer."""

    def __init__(self, place: Place, sealed: bool, summarized: bool) -> None:
        """`sealed`: the item carries `encrypted_content`, for the client to send back. `summarized`: `summary` has the
        reasoning, too, as many clients show nothing else."""
        self.place = place
        self._sealed = sealed
        self._summarized = summarized
        self._texts: list[str] = []

    def item(self, status: Status) -> Item:
        text = "".join(self._texts)
        is_open = status == "in_progress"
        return {
            "id": self.place.item_id,
            "type": "reasoning",
            "status": status,
            "summary": [] if is_open or not self._summarized else [_summary_part(text)],
            "content": [] if is_open else [_reasoning_part(text)],
            "encrypted_content": seal(text) if self._sealed and not is_open else None,
        }

    def opening(self) -> list[Event]:
        events = [self.place.event("response.content_part.added", content_index=0, part=_reasoning_part(""))]
        if self._summarized:
            part = _summary_part("")
            events.append(self.place.event("response.reasoning_summary_part.added", summary_index=0, part=part))
        return events

    def push(self, text: str) -> list[Event]:
        self._texts.append(text)
        events = [self.place.event("response.reasoning_text.delta", content_index=0, delta=text)]
        if self._summarized:
            events.append(self.place.event("response.reasoning_summary_text.delta", summary_index=0, delta=text))
        return events

    def closing(self) -> list[Event]:
        text = "".join(self._texts)
        events = [
            self.place.event("response.reasoning_text.done", content_index=0, text=text),
            self.place.event("response.content_part.done", content_index=0, part=_reasoning_part(text)),
        ]
        if self._summarized:
            part = _summary_part(text)
            events += [
                self.place.event("response.reasoning_summary_text.done", summary_index=0, text=text),
                self.place.event("response.reasoning_summary_part.done", summary_index=0, part=part),
            ]
        return events


class FunctionCall:
    """Call of a function."""

    def __init__(self, place: Place, call_id: str, tool: ToolName) -> None:
        self.place = place
        self._call_id = call_id
        self._tool = tool
        self._arguments: list[str] = []

    def item(self, status: Status) -> Item:
        fields = {"arguments": "" if status == "in_progress" else "".join(self._arguments)}
        return _call("function_call", self.place, status, self._call_id, self._tool, fields)

    def opening(self) -> list[Event]:
        return []

    def push(self, arguments: str) -> list[Event]:
        if not arguments:
            return []
        self._arguments.append(arguments)
        return [self.place.event("response.function_call_arguments.delta", delta=arguments)]

    def closing(self) -> list[Event]:
        arguments, name = "".join(self._arguments), self._tool.name
        return [self.place.event("response.function_call_arguments.done", name=name, arguments=arguments)]


class CustomToolCall:
    """Call of a custom tool, which takes a text."""

    def __init__(self, place: Place, call_id: str, tool: ToolName) -> None:
        self.place = place
        self._call_id = call_id
        self._tool = tool
        self._parser = CustomInput()
        self._input: list[str] = []

    def item(self, status: Status) -> Item:
        fields = {"input": "" if status == "in_progress" else "".join(self._input)}
        return _call("custom_tool_call", self.place, status, self._call_id, self._tool, fields)

    def opening(self) -> list[Event]:
        return []

    def push(self, arguments: str) -> list[Event]:
        return self._add(self._parser.push(arguments))

    def closing(self) -> list[Event]:
        events = self._add(self._parser.finish())
        events.append(self.place.event("response.custom_tool_call_input.done", input="".join(self._input)))
        return events

    def _add(self, text: str) -> list[Event]:
        if not text:
            return []
        self._input.append(text)
        return [self.place.event("response.custom_tool_call_input.delta", delta=text)]


def _text_part(text: str, logprobs: Sequence[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _summary_part(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}


def _call(kind: str, place: Place, status: Status, call_id: str, tool: ToolName, fields: dict[str, Any]) -> Item:
    item = {"id": place.item_id, "type": kind, "status": status, "call_id": call_id, "name": tool.name, **fields}
    return item if tool.namespace is None else item | {"namespace": tool.namespace}
