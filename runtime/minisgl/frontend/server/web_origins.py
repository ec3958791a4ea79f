"""Protection of the API from web pages that its users visit.

A browser sends requests of any page to any address, also to a server that only this machine can reach. It says in
`Origin` whose page it is, so requests of other pages are refused. A page may also make its own name resolve to the
server's address, and then its requests have the same origin. Such a name shows in `Host`, which on a loopback address
has no reason to be any name but localhost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.errors import CodedError
from minisgl.frontend.config import WebAccess
from minisgl.frontend.errors import ApiError
from minisgl.wire.web_pages import host_name, means_this_machine

ANY: Final = "*"
_NO_ORIGIN: Final = "null"
"""Sent for pages without an origin, such as local files."""
_SHOWN_CHARACTERS: Final = 200
"""Length to which an error quotes a header; longer than most names may be."""
_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}


class OriginListError(CodedError):
    """The list of allowed origins cannot be used. `code` is stable; the message says what to do next."""

    def __init__(self, origin: str) -> None:
        problem = f"{origin!r} of --allowed-origins is no origin"
        super().__init__("invalid_origin", f"{problem}; write SCHEME://HOST[:PORT], such as https://a.example, or *")


def without_foreign_pages(app: ASGIApp, access: WebAccess, *, on_loopback: bool) -> ASGIApp:
    """Wrap `app` in the middleware that rejects requests of web pages which may not use it. `on_loopback`: only this
    machine can connect. Raises OriginListError."""
    app = OriginMiddleware(app, access.allowed_origins, access.cors_origins)
    return HostMiddleware(app, access.allowed_hosts) if on_loopback or access.allowed_hosts else app


class OriginMiddleware:
    """Rejects requests of web pages of other origins, except those that are allowed."""

    def __init__(self, app: ASGIApp, allowed: Iterable[str], cors_origins: Iterable[str] = ()) -> None:
        """`allowed`, `cors_origins`: origins, or ANY; the latter as browsers send them. Raises OriginListError."""
        self._app = app
        self._allowed = {*map(_normal_origin, allowed), *cors_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError."""
        headers = Headers(scope=scope)
        if (origins := headers.getlist("origin")) and ANY not in self._allowed:
            hosts = headers.getlist("host")
            for origin in origins:
                if origin.lower() not in self._allowed and not (len(hosts) == 1 and _is_same(origin, hosts[0])):
                    raise _forbidden("origin_not_allowed", _foreign_origin(origin, headers))
        await self._app(scope, receive, send)


class HostMiddleware:
    """Rejects requests to a name that is neither localhost nor allowed. Addresses are allowed: nobody can make them
    point elsewhere."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        """`allowed`: names, or ANY."""
        self._app = app
        self._allowed = {host_name(host) for host in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError."""
        # A client without Host is no browser.
        for host in Headers(scope=scope).getlist("host"):
            name = host_name(host)
            if name not in self._allowed and ANY not in self._allowed and not means_this_machine(name):
                message = "the header Host has a name that is not this server's; allow the name with --allowed-hosts"
                raise _forbidden("host_not_allowed", message)
        await self._app(scope, receive, send)


def _normal_origin(origin: str) -> str:
    if origin in (ANY, _NO_ORIGIN):
        return origin
    scheme, separator, authority = origin.lower().rstrip("/").partition("://")
    if not scheme or not separator or not authority or "/" in authority:
        raise OriginListError(origin)
    return f"{scheme}://{authority.removesuffix(_DEFAULT_PORTS.get(scheme, ''))}"


def _is_same(origin: str, host: str) -> bool:
    """Return whether a page of `origin` came from the server that it sends a request to. The scheme may differ, because
    a proxy ends TLS."""
    scheme, _, authority = origin.lower().partition("://")
    port = _DEFAULT_PORTS.get(scheme)
    # A page of another scheme is an application's own.
    return port is not None and authority.removesuffix(port) == host.lower().removesuffix(port)


def _foreign_origin(origin: str, headers: Headers) -> str:
    """Return why requests of pages of `origin` are refused, and what to do."""
    shown = f"web pages of the origin {_shown(origin)} may not use this server"
    if not _passed_a_proxy(origin, headers):
        return f"{shown}; allow the origin with --allowed-origins"
    return (
        f"{shown}, because a proxy has replaced the header Host by {_shown(headers.get('host', ''))}; "
        "have the proxy pass the client's Host, or allow the origin with --allowed-origins"
    )


def _passed_a_proxy(origin: str, headers: Headers) -> bool:
    """Return whether the origin is that of a proxy in front of this server: the proxy says so, or the browser, which
    knows the address that it sent the request to. It decides about words of an error only: a client may lie."""
    forwarded = ",".join(headers.getlist("x-forwarded-host")).split(",")
    name = host_name(origin.partition("://")[2])
    by_proxy = name != "" and name in [host_name(host.strip()) for host in forwarded]
    return by_proxy or headers.get("sec-fetch-site") == "same-origin"


def _shown(header: str) -> str:
    """Return a header's value in quotes, printable and of limited length."""
    return ascii(header[:_SHOWN_CHARACTERS])


def _forbidden(code: str, message: str) -> ApiError:
    # The body is not read, so the connection cannot be used again.
    return ApiError(403, code, message, headers={"connection": "close"})
