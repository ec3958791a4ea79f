"""Decides which requests are recorded, and hands the spans of those to the exporter. Nothing of OpenTelemetry is
imported unless a collector is configured."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from minisgl.frontend.config import TraceOptions
from minisgl.frontend.metrics.types import Total
from minisgl.frontend.tracing.context import (
    TRACEPARENT,
    TRACESTATE,
    read_traceparent,
    read_tracestate,
    traceparent,
)
from minisgl.frontend.tracing.request_trace import RequestTrace, Span, new_span_id
from minisgl.frontend.tracing.sampling import Sampler, SamplerError, make_sampler

if TYPE_CHECKING:
    from minisgl.frontend.tracing.export import SpanExport

logger = logging.getLogger(__name__)

CLOSE_SECONDS: Final = 2.0
"""Longest time that a shutdown waits for spans to leave."""
_TRACES_PATH: Final = "/v1/traces"
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_TRACE_ID_BITS: Final = 128


class Tracer:
    """All methods but `close` belong to the event loop."""

    def __init__(self, sampler: Sampler, export: SpanExport) -> None:
        self._sampler = sampler
        self._export = export

    def begin(self, given: str, headers: Headers, *, is_trusted: bool = False) -> RequestTrace | None:
        """Return the trace of a request that is recorded; None: it is not. `given`: its `traceparent`; empty: none.
        `is_trusted`: it comes from a gateway."""
        parent = read_traceparent(given) if given else None
        # Not the id of a given trace: clients would choose one that is always recorded.
        number = random.getrandbits(_TRACE_ID_BITS) or 1
        if not self._sampler.records(number, parent, is_trusted=is_trusted):
            return None
        if parent is None:
            return RequestTrace(number, 0, "")
        return RequestTrace(parent.trace_id, parent.span_id, read_tracestate(headers.getlist(TRACESTATE)))

    def end(self, trace: RequestTrace, spans: Sequence[Span], now: float) -> None:
        """Export the spans of a request. `now`: time of the event loop."""
        self._export.add(trace, spans, time.time_ns() - int(now * 1e9))

    def close(self) -> None:
        """Export what is left, for at most CLOSE_SECONDS. Blocks."""
        self._export.close(CLOSE_SECONDS)


def unrecorded_headers(given: str, scope: Scope) -> dict[str, str]:
    """Return the headers that tell the next process not to record a request either. `given`: its `traceparent`; empty:
    none."""
    parent = read_traceparent(given) if given else None
    if parent is None:
        trace_id = random.getrandbits(_TRACE_ID_BITS) or 1
        return {TRACEPARENT: traceparent(trace_id, new_span_id(), sampled=False)}
    own = {TRACEPARENT: traceparent(parent.trace_id, parent.span_id, sampled=False)}
    state = read_tracestate(Headers(scope=scope).getlist(TRACESTATE))
    return {**own, TRACESTATE: state} if state else own


def create_tracer(
    options: TraceOptions, service: str, dropped: Total, variables: Mapping[str, str] = os.environ
) -> Tracer | None:
    """Return the tracer of a process; None: neither a flag nor a variable names a collector, or a variable is wrong.
    `service`: its name, unless a variable has another one. `dropped` counts the spans that were not exported."""
    if variables.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    given = [options.endpoint, *(variables.get(name, "").strip() for name in _ENDPOINTS)]
    url = next((each for each in given if each), "")
    if not url:
        return None
    try:
        sampler = make_sampler(options.sampling, variables)
    except SamplerError as error:
        logger.warning("%s; a share of %g is recorded", error, make_sampler(None, {}).share)
        sampler = make_sampler(None, {})
    from minisgl.frontend.tracing.export import SpanExport

    endpoint = None if options.endpoint is None else _with_path(options.endpoint)
    try:
        export = SpanExport(endpoint, _host(url), service, dropped)
    except ValueError as error:
        logger.warning("there are no traces: a variable of OpenTelemetry is not valid: %s", error)
        return None
    return Tracer(sampler, export)


def _host(url: str) -> str:
    """Return the name of a collector in the log: a user and password in its URL must not be there."""
    try:
        return urlsplit(url).netloc.rpartition("@")[2] or "the collector"
    except ValueError:
        # A variable may have any text; each export says what is wrong with it.
        return "the collector"


def _with_path(url: str) -> str:
    """Return the URL of a collector with the path of traces, if it has none of its own."""
    return url if urlsplit(url).path.strip("/") else url.rstrip("/") + _TRACES_PATH
