"""The record of one HTTP request, which travels in its ASGI scope: phase, times, outcome.

The middleware creates it; the access log, the limits, the metrics and the admin API read it.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Sequence
from typing import Final

import msgspec
from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import Scope

from minisgl.frontend.server.client_connection import ClientConnection
from minisgl.frontend.server.response_stream import Phase, ResponseStream
from minisgl.frontend.tracing.request_trace import RequestTrace

_KEY: Final = "minisgl.record"
"""Key of the record in the ASGI scope."""

NO_ROUTE: Final = "none"
"""Route of a path that none serves."""
OTHER_METHOD: Final = "other"
"""Stands in metrics for a method that the route does not have."""

TRACE_FIELD: Final = "trace"
LOGGED_HEADERS: Final = {"x-stainless-retry-count": "retry", "traceparent": TRACE_FIELD}
"""Request header → field of the access log."""

_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_LOGGED_VALUE: Final = re.compile(r"[\x20-\x7e]{1,128}")
_ADDRESS: Final = "address "
"""Begins the names of tenants without a key."""


class RequestRecord(msgspec.Struct, eq=False, kw_only=True):
    """One HTTP request. Times are the event loop's, in seconds; 0: not yet."""

    request_id: str
    response_id: str = ""
    """Identifier in the body of the response, without its prefix."""
    method: str
    path: str
    route: str = NO_ROUTE
    """Path of the route that it matches, with the names of its parameters."""
    route_method: str = OTHER_METHOD
    """`method`, if the route has it."""
    started_at: float
    headers: dict[str, str] = {}
    """Fields of the access log that repeat request headers."""
    key_name: str = ""
    """Name of the API key."""
    address: str = ""
    """IP address of the client."""
    from_gateway: bool = False
    """A trusted gateway has sent it."""
    given_tenant: str = ""
    """Tenant that the gateway names."""
    choices: int = 1
    """Choices by which the limits count it."""
    model: str = ""
    """Name by which the client calls the model."""
    status: int = 0
    error_code: str = ""
    error_status: int = 0
    """HTTP status of that error, also if the response had begun with another one."""
    response_complete: bool = False
    disconnected_in: Phase | None = None
    """Phase in which the client left, before its response was complete."""
    send_started_at: float = 0.0
    """Start of the send in progress; 0: none."""
    stream: ResponseStream | None = None
    """Output of a generation request, from its admission on."""
    client: ClientConnection | None = None
    trace: RequestTrace | None = None
    """None: the request is not recorded in a trace."""

    is_held: bool = False
    """It waits because no engine is routable."""

    @property
    def tenant(self) -> str:
        """Whose request it is, for the shares of keys and addresses."""
        # A gateway without keys names addresses; a key that was checked here says more.
        if self.given_tenant and not (self.key_name and self.given_tenant.startswith(_ADDRESS)):
            return f"gateway {self.given_tenant}"
        return f"key {self.key_name}" if self.key_name else f"{_ADDRESS}{_network(self.address)}"

    @property
    def phase(self) -> Phase:
        if self.stream is not None:
            return self.stream.phase
        return "held" if self.is_held else "reading"


def new_record(method: str, path: str, headers: Headers, started_at: float) -> RequestRecord:
    """Make a record with the client's `x-request-id`, or a random one."""
    given = headers.get("x-request-id", "")
    logged = {field: headers.get(header, "") for header, field in LOGGED_HEADERS.items()}
    return RequestRecord(
        request_id=given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16),
        method=method,
        path=path,
        started_at=started_at,
        headers={field: value for field, value in logged.items() if _LOGGED_VALUE.fullmatch(value)},
    )


def _network(address: str) -> str:
    """Return an IPv4 address as it is, and what is none, since a proxy may name anything. A client may have all IPv6
    addresses of a network of 64 bits."""
    if ":" not in address or address.startswith("::ffff:"):
        return address
    try:
        return str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))
    except ValueError:
        return address


def attach_record(scope: Scope, record: RequestRecord) -> None:
    scope[_KEY] = record


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of a request to the API's port."""
    record: RequestRecord = scope[_KEY]
    return record


def find_record(scope: Scope) -> RequestRecord | None:
    """Return the record of a request to any port; only the API's port keeps them."""
    record: RequestRecord | None = scope.get(_KEY)
    return record


_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Methods that are told apart where no route has them."""


class RoutePaths:
    """Labels of requests in metrics. A series is kept for each, however many paths and methods clients invent."""

    def __init__(self, routes: Sequence[Route]) -> None:
        """A path with a parameter ends with it, as in /v1/models/{name:path}."""
        self._methods = {route.path: frozenset(route.methods or _METHODS) for route in routes}
        self._beginnings = tuple((path.partition("{")[0], path) for path in self._methods if "{" in path)

    def match(self, path: str, method: str) -> tuple[str, str]:
        """Return the path of the route, with the name of its parameter, or NO_ROUTE; and the method, or OTHER_METHOD
        if the route does not have it."""
        route = self._route_of(path)
        return route, method if method in self._methods.get(route, _METHODS) else OTHER_METHOD

    def _route_of(self, path: str) -> str:
        if path in self._methods and "{" not in path:
            return path
        return next((route for beginning, route in self._beginnings if path.startswith(beginning)), NO_ROUTE)
