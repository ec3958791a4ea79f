"""The way of spans out of the process: OpenTelemetry's SDK, in a thread of its own, with a queue of limited length.

A collector that is slow or dead costs spans, which are counted, and one line in the log; never a request.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Sequence
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from minisgl.frontend.metrics.types import Total
from minisgl.frontend.tracing.request_trace import RequestTrace, Span
from minisgl.version import __version__

logger = logging.getLogger(__name__)

_KINDS: Final = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
_FLAGS: Final = TraceFlags(TraceFlags.SAMPLED)
_FAILED: Final = Status(StatusCode.ERROR)
_UNSET: Final = Status(StatusCode.UNSET)
_SCOPE: Final = InstrumentationScope("minisgl", __version__)
_LIBRARY: Final = "opentelemetry"
"""Logger of the SDK, and prefix of those of its modules."""
_QUEUE: Final = ("OTEL_BSP_MAX_QUEUE_SIZE", 2048)
_BATCH: Final = ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512)
"""Variables, and the SDK's own defaults."""


class SpanExport:
    """`add` belongs to the event loop, `close` to any thread."""

    def __init__(self, endpoint: str | None, collector: str, service: str, dropped: Total) -> None:
        """`endpoint`: None for that of OpenTelemetry's variables. `collector`: its name in the log. Raises ValueError
        for variables that the SDK refuses."""
        _keep_problems()
        self._dropped = dropped
        self._exporter = _CountingExporter(OTLPSpanExporter(endpoint), collector, dropped)
        self._most = _size(*_QUEUE)
        # The SDK refuses a queue that is shorter than a batch, as a queue of less than 512 alone would be.
        batch = min(_size(*_BATCH), self._most)
        self._processor = BatchSpanProcessor(
            self._exporter, max_queue_size=self._most, max_export_batch_size=batch
        )
        self._resource = _resource(service)
        self._added = 0

    def add(self, trace: RequestTrace, spans: Sequence[Span], unix_ns: int) -> None:
        """Queue the spans of a request, or drop them if the queue is full. `unix_ns`: Unix time at time 0 of theirs."""
        # The SDK would drop the oldest spans, and not tell.
        if self._added + len(spans) - self._exporter.taken > self._most:
            self._exporter.count_dropped(len(spans))
            return
        self._added += len(spans)
        state = TraceState.from_header([trace.state]) if trace.state else None
        for span in spans:
            self._processor.on_end(self._ended(trace, span, state, unix_ns))

    def close(self, seconds: float) -> None:
        """Export the rest within this time, and stop."""
        thread = threading.Thread(target=self._processor.shutdown, name="traces-end", daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            # Ends the pauses between attempts, so that the threads end soon. What is left is lost.
            self._exporter.shutdown()

    def _ended(self, trace: RequestTrace, span: Span, state: TraceState | None, unix_ns: int) -> ReadableSpan:
        """Return the span as the SDK has it. To have the SDK record it as it goes takes thirty times as long."""
        parent = None
        if span.parent_id:
            parent = SpanContext(trace.trace_id, span.parent_id, span.parent_id == trace.parent_id, _FLAGS, state)
        return ReadableSpan(
            span.name,
            SpanContext(trace.trace_id, span.span_id, False, _FLAGS, state),
            parent,
            self._resource,
            span.attributes,
            [Event(event.name, event.attributes, unix_ns + int(event.at * 1e9)) for event in span.events],
            kind=_KINDS[span.kind],
            status=_FAILED if span.has_failed else _UNSET,
            start_time=unix_ns + int(span.start * 1e9),
            end_time=unix_ns + int(span.end * 1e9),
            instrumentation_scope=_SCOPE,
        )


class _CountingExporter(SpanExporter):
    """Counts what an exporter takes and loses. The thread of the SDK calls `export`."""

    def __init__(self, exporter: SpanExporter, collector: str, dropped: Total) -> None:
        self._exporter = exporter
        self._collector = collector
        self._dropped = dropped
        self._lock = threading.Lock()
        self._is_down = self._is_shut_down = False
        self.taken = 0
        """Spans whose export has ended, well or not."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
            problem = _problems.last
        except Exception as error:
            result, problem = SpanExportResult.FAILURE, str(error)
        self.taken += len(spans)
        if result is SpanExportResult.SUCCESS:
            if self._is_down:
                logger.info("traces are exported to %s again", self._collector)
        else:
            self.count_dropped(len(spans))
            if not self._is_down:
                logger.warning("traces cannot be exported to %s, spans are dropped: %s", self._collector, problem)
        self._is_down = result is not SpanExportResult.SUCCESS
        return result

    def count_dropped(self, spans: int) -> None:
        with self._lock:
            self._dropped.value += spans

    def shutdown(self) -> None:
        if not self._is_shut_down:
            self._is_shut_down = True
            self._exporter.shutdown()


class _Problems(logging.Handler):
    """Keeps the last problem that the SDK logs, once for each attempt, instead of writing it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = "no reason is known"

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()


_problems: Final = _Problems()


def _keep_problems() -> None:
    library = logging.getLogger(_LIBRARY)
    library.propagate = False
    if _problems not in library.handlers:
        library.addHandler(_problems)


def _resource(service: str) -> Resource:
    """Return what all spans of this process have in common. Variables come before our own names."""
    own = {
        "service.name": service,
        "service.version": __version__,
        "service.instance.id": f"{socket.gethostname()}-{os.getpid()}",
    }
    given = OTELResourceDetector().detect().attributes
    made = Resource.create({name: value for name, value in own.items() if name not in given})
    return _Resource(made)


class _Resource(Resource):
    """Its hash is computed once. The SDK groups spans by it, and would write all attributes as JSON for each of them,
    a quarter of the time of an export."""

    def __init__(self, made: Resource) -> None:
        super().__init__(made.attributes, made.schema_url)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash


def _size(variable: str, default: int) -> int:
    """Return the number of spans in a variable, or the default without one that is positive."""
    try:
        given = int(os.environ.get(variable, default))
    except ValueError:
        return default
    return given if given > 0 else default
