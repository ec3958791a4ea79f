"""The request of a stream, in the form in which the gateway knows requests."""

from __future__ import annotations

import ipaddress
from typing import Any, Final
from urllib.parse import unquote

from starlette.datastructures import Headers
from starlette.types import Scope

from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.connection import MAX_HEADER_BYTES
from minisgl.frontend.server.request_record import TRACE_FIELD, RequestRecord, attach_record, new_record
from minisgl.frontend.tracing.context import TRACEPARENT, TRACESTATE
from minisgl.frontend.tracing.tracer import Tracer
from minisgl.gateway.endpoint_picker import messages
from minisgl.gateway.handler import TARGET
from minisgl.gateway.paths import POST_PATHS, split_path

_MODEL_HEADERS: Final = ("x-gateway-model-name", "x-gateway-base-model-name")
"""Headers in which something in front of a Gateway names the model of a request whose body does not."""


def read_request(first: Any, now: float, tracer: Tracer | None) -> tuple[Scope, RequestRecord]:
    """Return a request as an ASGI server would give it, and its record. `first`: message with its headers."""
    headers = messages.headers_of(first.request_headers)
    pseudo = {name: value.decode("latin-1") for name, value in headers if name.startswith(b":")}
    plain = [(name, value) for name, value in headers if not name.startswith(b":") and name != b"host"]
    host = pseudo.get(b":authority") or next((v.decode("latin-1") for name, v in headers if name == b"host"), "")
    method = pseudo.get(b":method", "GET")
    target, path = split_path(unquote(pseudo.get(b":path", "/").partition("?")[0]))
    scope: Scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(b"host", host.encode("latin-1")), *plain],
    }
    if target is not None:
        scope[TARGET] = target
    read = Headers(scope=scope)
    record = new_record(method, path, read, now)
    record.address = _address(read)
    if path in POST_PATHS:
        record.route, record.route_method = path, method if method == "POST" else record.route_method
    given = record.headers.get(TRACE_FIELD, "")
    if tracer is not None and method == "POST" and (trace := tracer.begin(given, read)) is not None:
        record.trace = trace
        record.headers = {**record.headers, TRACE_FIELD: trace.traceparent(trace.span_id)}
    attach_record(scope, record)
    return scope, record


def check_header_size(first: Any) -> None:
    """Raises ApiError for headers that are too large to be kept until the response is complete."""
    if first.request_headers.ByteSize() > MAX_HEADER_BYTES:
        message = f"the headers exceed {MAX_HEADER_BYTES} bytes; send fewer or shorter ones"
        raise ApiError(431, "headers_too_large", message)


def trace_headers(record: RequestRecord) -> dict[str, str]:
    """Return the headers by which a frontend joins the trace of a request that is recorded."""
    trace = record.trace
    if trace is None:
        return {}
    own = {TRACEPARENT: trace.traceparent(trace.span_id)}
    return {**own, TRACESTATE: trace.state} if trace.state else own


def model_header(scope: Scope) -> str | None:
    """Return the model that a header names; None: none does."""
    headers = Headers(scope=scope)
    return next((found for name in _MODEL_HEADERS if (found := headers.get(name))), None)


def _address(headers: Headers) -> str:
    """Return the address of the client that the proxy has added to the list; empty: it is none."""
    last = headers.get("x-forwarded-for", "").rpartition(",")[2].strip()
    try:
        return str(ipaddress.ip_address(last))
    except ValueError:
        return ""
