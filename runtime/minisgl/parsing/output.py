"""Output of a scanner: text, reasoning and tool calls in the order of the answer."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from typing import Final, NamedTuple

from minisgl.wire.text import ToolCallDelta

_LETTERS: Final = string.ascii_letters + string.digits


class Text(NamedTuple):
    """New text of the answer."""

    text: str


class Reasoning(NamedTuple):
    """New reasoning."""

    text: str


Event = Text | Reasoning | ToolCallDelta


def call_id() -> str:
    """Return a new identifier of a tool call, as OpenAI's are."""
    return "call_" + "".join(secrets.choice(_LETTERS) for _ in range(24))


def short_call_id() -> str:
    """Return a new identifier for templates that accept only nine letters and digits (Mistral)."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


class Output:
    """Collects events between two calls of `take`."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self.calls = 0
        """Number of tool calls so far."""
        self._events: list[Event] = []
        self._new_id = new_id

    def text(self, text: str) -> None:
        if text:
            if self._events and isinstance(last := self._events[-1], Text):
                self._events[-1] = Text(last.text + text)
            else:
                self._events.append(Text(text))

    def reasoning(self, text: str) -> None:
        if text:
            self._events.append(Reasoning(text))

    def begin_call(self, name: str) -> None:
        """Begin the next tool call. Its arguments follow, until the next one begins."""
        self._events.append(ToolCallDelta(self.calls, self._new_id(), name, ""))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call that began last."""
        if text:
            last = self._events[-1] if self._events else None
            if isinstance(last, ToolCallDelta) and not last.name:
                self._events[-1] = ToolCallDelta(last.index, "", "", last.arguments + text)
            else:
                self._events.append(ToolCallDelta(self.calls - 1, "", "", text))

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events


class Call:
    """One tool call that is being parsed. Before it has begun, it may still turn out to be ordinary text."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self.has_begun = False
        self.is_empty = True
        """It has no arguments so far."""

    def begin(self, name: str) -> None:
        self.has_begun = True
        self._output.begin_call(name)

    def arguments(self, text: str) -> None:
        """Add to the arguments, which are the text of a JSON object."""
        if self.is_empty:
            text = text.lstrip()
        if text:
            self.is_empty = False
            self._output.arguments(text)

    def end(self) -> None:
        """End a complete call. Without arguments they are an empty object."""
        if self.is_empty:
            self.arguments("{}")
