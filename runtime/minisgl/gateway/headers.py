"""Headers that a gateway passes on, and those that end at it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

Headers = Iterable[tuple[bytes, bytes]]
"""Names in lower case, and values."""

_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""They belong to one connection, as do those that `Connection` names."""

_OWN_PREFIX: Final = b"x-minisgl-"
"""Headers between gateways and frontends. A client that sends one would speak as the gateway."""

HOPS_HEADER: Final = "x-minisgl-hops"
"""Gateways that a request has passed."""
_HOPS: Final = HOPS_HEADER.encode()
MAX_HOPS: Final = 4
"""A gateway may stand in front of another one. More are a circle, in which a request would go round until its end."""

_NOT_REQUESTED: Final = frozenset(
    {
        b"host",
        b"content-length",
        b"cookie",
        b"expect",
        b"forwarded",
        b"origin",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-proto",
        b"x-request-id",
    }
)
"""Of requests: set anew, or judged here."""

_KEYS: Final = frozenset({b"authorization", b"x-api-key"})
_TRACE: Final = frozenset({b"traceparent", b"tracestate"})

_NOT_ANSWERED: Final = frozenset({b"date", b"server", b"x-request-id", b"request-id", b"x-minisgl-usage"})
"""Of responses: set anew, or meant for the gateway."""


def hops(headers: Headers) -> int:
    """Return the number of gateways that a request has passed, which is 0 for what a client invents."""
    given = [value for name, value in headers if name == _HOPS]
    return max((int(value) for value in given if len(value) <= 3 and value.isdigit()), default=0)


def request_head(method: str, path: str, query: bytes, host: str, headers: Headers, length: int) -> bytes:
    """Return the head of a request with a body of `length` bytes. `headers`: what `passed_request_headers` returns, and
    the gateway's own."""
    target = path.encode() + (b"?" + query if query else b"")
    lines = [b"%b %b HTTP/1.1" % (method.encode(), target), b"host: " + host.encode()]
    lines += [b"%b: %b" % header for header in headers]
    if method == "POST":
        lines.append(b"content-length: %d" % length)
    return b"\r\n".join([*lines, b"", b""])


def passed_request_headers(
    headers: Headers, *, with_keys: bool, with_trace: bool = True
) -> list[tuple[bytes, bytes]]:
    """Return the headers of a client's request for a frontend. `with_keys`: also the client's API key. `with_trace`:
    also those that name its trace."""
    headers = list(headers)
    dropped = _HOP_BY_HOP | _NOT_REQUESTED | _named(headers) | (frozenset() if with_keys else _KEYS)
    dropped |= frozenset() if with_trace else _TRACE
    return [(name, value) for name, value in headers if name not in dropped and not name.startswith(_OWN_PREFIX)]


def dropped_by_picker(headers: Headers, *, with_keys: bool, with_trace: bool) -> list[str]:
    """Return the headers of a client's request that end at the gateway where a proxy forwards it. `with_keys`: the
    client's API key does not. `with_trace`: nor do those that name its trace."""
    dropped = (frozenset() if with_keys else _KEYS) | (frozenset() if with_trace else _TRACE)
    names = dict.fromkeys(name for name, _ in headers if name in dropped or name.startswith(_OWN_PREFIX))
    return [name.decode("latin-1") for name in names]


def passed_response_headers(headers: Headers, *, with_length: bool) -> list[tuple[bytes, bytes]]:
    """Return the headers of a frontend's response for the client. `with_length`: its body stays as it is."""
    headers = list(headers)
    dropped = _HOP_BY_HOP | _NOT_ANSWERED | _named(headers) | (frozenset() if with_length else {b"content-length"})
    return [(name, value) for name, value in headers if name not in dropped]


def _named(headers: Headers) -> frozenset[bytes]:
    """Return the headers that `Connection` names."""
    values = [value for name, value in headers if name == b"connection"]
    return frozenset(token.strip().lower() for value in values for token in value.split(b","))
