"""Requests that ask for another protocol, which the server does not speak."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable

import pytest

from support.frontend.fake_scheduler import WAIT_SECONDS
from support.frontend.stack import FrontendStack

# As Java's HTTP client sends them.
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAA\r\n"
HIDDEN = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


def statuses(stack: FrontendStack, *pieces: bytes) -> list[int]:
    """Statuses of all responses on a connection that gets `pieces` one after the other."""
    with socket.create_connection(("127.0.0.1", stack.server.port), WAIT_SECONDS) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            client.sendall(piece)
        answer = b""
        while data := client.recv(65536):
            answer += data
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


def chunked(body: bytes) -> bytes:
    return b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


def with_length(body: bytes) -> bytes:
    return b"content-length: %d\r\n\r\n%s" % (len(body), body)


@pytest.mark.parametrize("encode", [with_length, chunked])
@pytest.mark.parametrize("cut", [0, 1, 40, None])
def test_a_body_is_read_and_never_taken_for_a_request(
    stack: FrontendStack, encode: Callable[[bytes], bytes], cut: int | None
) -> None:
    body = json.dumps({"prompt": "x", "text": HIDDEN.decode()}).encode()
    head, _, rest = encode(body).partition(b"\r\n\r\n")
    whole = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\n" + H2C + head + b"\r\n\r\n"
    pieces = [whole + rest + LAST] if cut is None else [whole, rest[:cut], rest[cut:], LAST]
    assert statuses(stack, *filter(None, pieces)) == [200, 200]


def test_requests_without_a_body_follow_each_other(stack: FrontendStack) -> None:
    asks = b"GET /version HTTP/1.1\r\nhost: localhost\r\n" + H2C + b"\r\n"
    assert statuses(stack, asks * 3 + LAST) == [200] * 4


def test_a_hidden_request_is_part_of_the_body(stack: FrontendStack) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\n" + H2C + b"content-length: %d\r\n\r\n" % len(HIDDEN)
    assert statuses(stack, head, HIDDEN, LAST) == [400, 200]
