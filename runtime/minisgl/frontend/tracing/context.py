"""W3C Trace Context: the headers with which a request says to which trace it belongs. Pure."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACESTATE: Final = re.compile(r"[\x20-\x7e]{1,512}")
_INVALID_VERSION: Final = "ff"
_FIRST_VERSION: Final = "00"
_SAMPLED: Final = 1


class Parent(NamedTuple):
    """The span of another process to which a request belongs."""

    trace_id: int
    span_id: int
    is_sampled: bool


def read_traceparent(value: str) -> Parent | None:
    """Return the parent in a `traceparent`; None for a value that is none. Later versions have more fields."""
    found = _TRACEPARENT.fullmatch(value.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == _INVALID_VERSION or (version == _FIRST_VERSION and rest):
        return None
    parent = Parent(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED))
    return parent if parent.trace_id and parent.span_id else None


def read_tracestate(values: list[str]) -> str:
    """Return the `tracestate` of a request's headers; empty: none that is valid."""
    joined = ",".join(values).strip()
    return joined if _TRACESTATE.fullmatch(joined) else ""


def traceparent(trace_id: int, span_id: int, *, sampled: bool) -> str:
    return f"{_FIRST_VERSION}-{trace_id:032x}-{span_id:016x}-{int(sampled):02x}"
