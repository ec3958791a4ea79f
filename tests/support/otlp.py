"""A collector of traces: OTLP over HTTP, on a port of the loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

WAIT_SECONDS = 30.0
KINDS = {1: "internal", 2: "server", 3: "client"}


class CollectedSpan(msgspec.Struct):
    """One span; identifiers in hexadecimal digits, times in Unix nanoseconds."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    state: str
    start: int
    end: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    failed: bool
    resource: dict[str, Any]

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9


class Collector:
    """`spans` in the order of arrival. While `status` is not 200, requests get it and their spans are not kept."""

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        self.headers: list[dict[str, str]] = []
        self.paths: set[str] = set()
        self.status = 200
        self.raw = b""
        """All bodies."""
        self._answers = threading.Event()
        self._answers.set()
        self._changed = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector._take(self.path, dict(self.headers.items()), body)
                collector._answers.wait(WAIT_SECONDS)
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def wait_for(self, condition: Callable[[list[CollectedSpan]], bool]) -> list[CollectedSpan]:
        """Return the spans once the condition holds of them."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.spans), WAIT_SECONDS), self.spans
            return list(self.spans)

    def trace_of(self, request_id: str) -> list[CollectedSpan]:
        """Return the spans of the trace to which a request belongs that has ended, the earliest first."""
        spans = self.wait_for(lambda spans: any(_is_request(span, request_id) for span in spans))
        (trace_id, *_) = {span.trace_id for span in spans if _is_request(span, request_id)}
        return sorted((span for span in spans if span.trace_id == trace_id), key=lambda span: span.start)

    def stall(self) -> None:
        """Answer no request until `go_on`."""
        self._answers.clear()

    def go_on(self) -> None:
        self._answers.set()

    def wait_for_request(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.headers, WAIT_SECONDS), "no request has come"

    def close(self) -> None:
        self.go_on()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            self.paths.add(path)
            self.headers.append(headers)
            self.raw += body
            if self.status == 200:
                self.spans += _spans(request)
            self._changed.notify_all()


def _is_request(span: CollectedSpan, request_id: str) -> bool:
    return span.kind == "server" and span.attributes.get("minisgl.request.id") == request_id


def _spans(request: Any) -> Iterator[CollectedSpan]:
    for group in request.resource_spans:
        resource = _values(group.resource.attributes)
        for scope in group.scope_spans:
            for span in scope.spans:
                yield CollectedSpan(
                    service=resource["service.name"],
                    name=span.name,
                    kind=KINDS[span.kind],
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    state=span.trace_state,
                    start=span.start_time_unix_nano,
                    end=span.end_time_unix_nano,
                    attributes=_values(span.attributes),
                    events=[(event.name, _values(event.attributes)) for event in span.events],
                    failed=span.status.code == 2,
                    resource=resource,
                )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def collector() -> Iterator[Collector]:
    made = Collector()
    try:
        yield made
    finally:
        made.close()
