"""httptools' parser of requests, without `Upgrade`.

llhttp ends a request that asks for another protocol at its headers. A server that stays with HTTP/1.1 must read its
body (RFC 9110, section 7.8): otherwise the body would be taken for the next request. Java's HTTP client asks for
HTTP/2 in each first request.
"""

from __future__ import annotations

from typing import Any, Protocol

import httptools


class Callbacks(Protocol):
    """What httptools calls for a request."""

    framing: bytes
    """Header that says where the body of the request ends; empty if it has none."""

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_chunk_header(self) -> None: ...
    def on_message_complete(self) -> None: ...


class HttpParser:
    """Calls `on_message_complete` a first time behind the headers of a request with `Upgrade`: see `is_upgrading`."""

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks = callbacks
        self._parser = _new_parser(callbacks)

    @property
    def is_upgrading(self) -> bool:
        """The request asks for another protocol, and its body has not begun."""
        return bool(self._parser.should_upgrade())

    def should_upgrade(self) -> bool:
        """No other protocol is spoken."""
        return False

    def should_keep_alive(self) -> bool:
        return bool(self._parser.should_keep_alive())

    def get_http_version(self) -> str:
        return str(self._parser.get_http_version())

    def get_method(self) -> bytes:
        return bytes(self._parser.get_method())

    def feed_data(self, data: bytes) -> None:
        """Parse `data`. Raises httptools.HttpParserError for what is not HTTP."""
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._parser = _new_parser(_BehindHead(self._callbacks))
                # The same body, behind headers that ask for nothing.
                self._parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n\r\n" % self._callbacks.framing)


class _BehindHead:
    """Callbacks of a request whose headers are known, and of those behind it."""

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks = callbacks
        self._is_head = True
        self.on_body = callbacks.on_body
        self.on_chunk_header = callbacks.on_chunk_header
        self.on_message_complete = callbacks.on_message_complete

    def on_message_begin(self) -> None:
        if not self._is_head:
            self._callbacks.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_head:
            self._callbacks.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_head:
            self._callbacks.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._is_head:
            self._callbacks.on_headers_complete()
        self._is_head = False


def _new_parser(callbacks: Any) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(callbacks)
    # As uvicorn does: many clients send more than their content-length says.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
