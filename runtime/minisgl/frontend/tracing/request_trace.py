"""The trace of one request while it runs: its identity, and the spans below it that have ended."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from minisgl.frontend.tracing.context import traceparent

Value = str | int | float | Sequence[str]
SpanKind = Literal["server", "client", "internal"]

_SPAN_ID_BITS: Final = 64


def new_span_id() -> int:
    return random.getrandbits(_SPAN_ID_BITS) or 1


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened at one moment of a span."""

    name: str
    at: float
    attributes: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a request's time. Times are the event loop's, in seconds. `parent_id`: 0 for the first span of a
    trace."""

    name: str
    start: float
    end: float
    span_id: int
    parent_id: int
    kind: SpanKind = "internal"
    attributes: Mapping[str, Value] = field(default_factory=dict)
    events: Sequence[SpanEvent] = ()
    has_failed: bool = False


@dataclass(slots=True, eq=False)
class RequestTrace:
    """A request that is recorded. `parent_id`: the span of another process to which it belongs; 0: none."""

    trace_id: int
    parent_id: int
    state: str
    """Its `tracestate`."""
    span_id: int = field(default_factory=new_span_id)
    """Of the request itself."""
    spans: list[Span] = field(default_factory=list)
    """Those below it."""
    attributes: dict[str, Value] = field(default_factory=dict)
    """Of the request's span, beside those that follow from its record."""

    def traceparent(self, span_id: int) -> str:
        """Return the header for a request that belongs to this span."""
        return traceparent(self.trace_id, span_id, sampled=True)

    def add(
        self,
        name: str,
        start: float,
        end: float,
        attributes: Mapping[str, Value] | None = None,
        *,
        kind: SpanKind = "internal",
        span_id: int = 0,
        has_failed: bool = False,
    ) -> None:
        """Add a span below that of the request. `span_id`: one that other processes know already; 0: a new one."""
        own_id = span_id or new_span_id()
        self.spans.append(
            Span(name, start, end, own_id, self.span_id, kind, attributes or {}, has_failed=has_failed)
        )
