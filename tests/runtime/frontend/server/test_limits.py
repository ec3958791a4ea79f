"""Limits that do not depend on the content of a request: sizes, times, and clients that are slow or wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from minisgl.frontend.config import RequestLimits
from minisgl.frontend.errors import ApiError
from minisgl.frontend.server import connection
from minisgl.frontend.server.client_connection import ClientConnection
from minisgl.frontend.server.request_record import RequestRecord
from minisgl.frontend.server.request_tracker import RequestTracker
from minisgl.frontend.server.response_stream import ResponseStream
from minisgl.frontend.server.watchdog import check
from minisgl.wire.messages import Abort, Ack, FromScheduler, Status, Submit
from support.frontend.fake_scheduler import WAIT_SECONDS, FakeScheduler, answer_with, row
from support.frontend.served import eventually
from support.frontend.stack import FrontendStack, ids
from support.messages import status_of

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}

MakeStack = Callable[..., FrontendStack]


def talk(stack: FrontendStack, request: bytes) -> tuple[int, str]:
    """Return status and error code of the response that ends the connection."""
    with socket.create_connection(("127.0.0.1", stack.server.port), WAIT_SECONDS) as client:
        client.sendall(request)
        answer = b""
        while data := client.recv(65536):
            answer += data
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def post(body: bytes, headers: bytes = b"") -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n%scontent-length: %d\r\n\r\n%s" % (
        headers,
        len(body),
        body,
    )


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-long: " + b"a" * 40_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-without-end: " + b"a" * 40_000,
        b"GET /health HTTP/1.1\r\n" + b"".join(b"x-%d: %s\r\n" % (i, b"a" * 30) for i in range(1000)) + b"\r\n",
        b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ],
)
def test_the_size_of_headers_is_limited(stack: FrontendStack, request_bytes: bytes) -> None:
    assert talk(stack, request_bytes) == (431, "headers_too_large")


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "body",
    [
        b"0\r\n" + b"x: %s\r\n" % (b"a" * 40_000) + b"\r\n",
        b"0\r\n" + b"x: a\r\n" * 10_000 + b"\r\n",
        b"2\r\n{}\r\n0\r\n" + b"x: a\r\n" * 10_000 + b"\r\n",
    ],
    ids=["long", "many", "behind a body"],
)
def test_the_size_of_trailers_is_limited(stack: FrontendStack, body: bytes) -> None:
    assert talk(stack, CHUNKED + body) == (431, "headers_too_large")


@pytest.mark.parametrize("begin", [b"0\r\nx: a", b"0\r\n", b"2\r\n{}\r\n0\r\nx: a", b"2;x="], ids=repr)
@pytest.mark.parametrize("more", [b"a" * 65536, b"b: c\r\n" * 8192], ids=["long", "many"])
@pytest.mark.parametrize("head", [CHUNKED, CHUNKED.replace(b"POST /v1/completions", b"GET /status")], ids=repr)
def test_no_port_reads_a_chunked_request_without_end(
    make_stack: MakeStack, head: bytes, begin: bytes, more: bytes
) -> None:
    stack = make_stack(control_port=0)
    port = stack.server.port if head is CHUNKED else stack.server.control_port
    sent = 0
    with socket.create_connection(("127.0.0.1", port), WAIT_SECONDS) as client, contextlib.suppress(OSError):
        client.sendall(head + begin)
        while sent < 64 << 20:
            client.sendall(more)
            sent += len(more)
    assert sent < 64 << 20, "the connection was closed"


def test_trailers_are_no_headers(stack: FrontendStack) -> None:
    stack.scheduler.answer = answer_with(ids("a"))
    body = b'{"prompt": "a", "max_tokens": 1}'
    chunks = b"%x\r\n%s\r\n0\r\nx-request-timeout-ms: none\r\n\r\n" % (len(body), body)
    with socket.create_connection(("127.0.0.1", stack.server.port), WAIT_SECONDS) as client:
        client.sendall(CHUNKED + chunks)
        assert client.recv(65536).startswith(b"HTTP/1.1 200")


def test_the_requests_that_a_connection_sends_ahead_are_limited(stack: FrontendStack) -> None:
    stack.scheduler.answer = lambda submit: [Ack(submit.id)]
    first = post(b'{"prompt": "a", "stream": true}')
    with socket.create_connection(("127.0.0.1", stack.server.port), WAIT_SECONDS) as client:
        client.sendall(first)
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        client.sendall(b"GET /health HTTP/1.1\r\n\r\n" * 2000)
        with contextlib.suppress(ConnectionResetError):
            while client.recv(65536):
                continue
    assert stack.scheduler.wait_for(Abort)
    assert 'code="invalid_http"' not in metrics(stack)


@pytest.mark.parametrize("value", [b"xchunked", b"gzip", b"gzip, chunked", b"identity"])
@pytest.mark.parametrize("method", [b"POST /v1/completions", b"GET /health"])
def test_a_transfer_encoding_other_than_chunked_gets_an_error_response(
    stack: FrontendStack, method: bytes, value: bytes
) -> None:
    request = method + b" HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: " + value + b"\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    assert talk(stack, request) == (501, "unsupported_transfer_encoding")


@pytest.mark.parametrize("chunk", [b"zz\r\n", b"2\r\n{}}\r\n", b"0\r\nbad trailer\r\n"])
def test_a_broken_body_gets_an_error_response(stack: FrontendStack, chunk: bytes) -> None:
    assert talk(stack, CHUNKED + chunk) == (400, "invalid_http")


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (post('{"prompt": "é", "max_tokens": 1}'.encode())[:-1] + b"x}\n\n", (400, "invalid_json")),
        (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n\r\n{}", (400, "invalid_json")),
        (post(b"{}") + b"\x00\xff" * 50, (400, "missing_required_parameter")),
        (post(b"{}") + CHUNKED.replace(b"chunked", b"xchunked"), (400, "missing_required_parameter")),
    ],
    ids=["length in characters", "no length", "bytes", "another request"],
)
def test_a_valid_request_is_answered_although_more_follows(
    stack: FrontendStack, request_bytes: bytes, expected: tuple[int, str]
) -> None:
    assert talk(stack, request_bytes) == expected


def test_a_stream_is_completed_although_no_request_follows(stack: FrontendStack) -> None:
    stack.scheduler.answer = lambda submit: [Ack(submit.id)]
    with socket.create_connection(("127.0.0.1", stack.server.port), WAIT_SECONDS) as client:
        client.sendall(post(b'{"prompt": "a", "stream": true, "max_tokens": 1}'))
        answer = client.recv(65536)
        client.sendall(b"\x00" * 100)
        (submit,) = stack.scheduler.wait_for(Submit)
        stack.scheduler.send(row(submit.id, 0, ids("a")[0], "length"), to=submit)
        while data := client.recv(65536):
            answer += data
    assert b"[DONE]" in answer


def test_invalid_http_gets_an_error_response(stack: FrontendStack) -> None:
    assert talk(stack, b"\x16\x03\x01\x02\x00 hello\r\n\r\n") == (400, "invalid_http")
    assert talk(stack, b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n") == (
        400,
        "invalid_http",
    )


def test_headers_have_a_time_limit(stack: FrontendStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.05)
    assert talk(stack, b"GET /health HTTP/1.1\r\nhost:") == (408, "head_timeout")


def test_each_request_of_a_connection_has_its_own_time_limit(
    stack: FrontendStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough for the first one to be sent.
    monkeypatch.setattr(connection, "HEADER_SECONDS", 2.0)
    with socket.create_connection(("127.0.0.1", stack.server.port), WAIT_SECONDS) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /hea")
        answer = b""
        while data := client.recv(65536):
            answer += data
    assert answer.startswith(b"HTTP/1.1 200") and b"head_timeout" in answer


def test_the_body_has_a_time_limit(make_stack: MakeStack) -> None:
    stack = make_stack(limits=RequestLimits(body_seconds=0.05))
    assert talk(stack, post(b'{"prompt": "a"}')[:-3]) == (408, "body_timeout")


def test_the_size_of_a_body_without_length_is_limited(make_stack: MakeStack) -> None:
    stack = make_stack(max_body_bytes=1000)
    chunk = b"%x\r\n%s\r\n" % (600, b" " * 600)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    assert talk(stack, head + chunk + chunk) == (413, "body_too_large")


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "top_p": -Infinity}',
        b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
        b'{"prompt": "\xff"}',
        b"[" * 3_000_000,
        b'{"prompt": ' + b" " * 500_000,
    ],
)
def test_hostile_bodies_are_rejected(stack: FrontendStack, body: bytes) -> None:
    answer = stack.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert len(answer.text) < 1000, "the body is not repeated"
    assert not stack.scheduler.received(Submit)


def narrow_listener() -> int:
    """Return a bound socket. Its connections inherit the size of its buffer, so that little data fills them."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        return listener.detach()


def narrow_client(stack: FrontendStack) -> socket.socket:
    client = socket.socket()
    client.settimeout(WAIT_SECONDS)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", stack.server.port))
    return client


def serve_long_name(stack: FrontendStack, answer: Callable[[Submit], list[FromScheduler]]) -> None:
    """Serve a model whose long name, which is in every event, makes streams large."""
    stack.scheduler.close()
    stack.wait_until_served(False)
    stack.scheduler = FakeScheduler(stack.scheduler_address, stack.card("long" * 1000), answer)
    stack.wait_until_served()


def in_flight(stack: FrontendStack) -> set[RequestRecord]:
    return stack.server._tokenizers.requests.in_flight


def test_a_client_that_does_not_read_a_stream_is_dropped(make_stack: MakeStack) -> None:
    stack = make_stack(limits=RequestLimits(send_seconds=2.0), socket_fd=narrow_listener())
    serve_long_name(stack, lambda submit: [Ack(submit.id)])
    with narrow_client(stack) as client:
        client.sendall(post(b'{"prompt": "a", "stream": true, "max_tokens": 200}'))
        (submit,) = stack.scheduler.wait_for(Submit)
        for index in range(150):
            stack.scheduler.send(row(submit.id, index, ids("a")[0]), to=submit)
            # Lets the stream run, so that tokens are not joined to one event.
            stack.http.get("/health")
        assert stack.scheduler.wait_for(Abort)[0].id == submit.id
        assert re.search(r"^minisgl:slow_clients_total\S* 1$", stack.http.get("/metrics").text, re.MULTILINE)


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        # More than the server writes at once, and less.
        ("/tokenize", b'{"prompt": "%s"}' % (b"a " * 200_000)),
        ("/tokenize", b'{"prompt": "%s"}' % (b"a " * 8_000)),
        ("/v1/completions", b'{"prompt": "a", "stream": true, "max_tokens": 1, "n": 10}'),
    ],
    ids=["large", "small", "stream"],
)
def test_a_client_that_does_not_read_the_last_part_is_dropped(
    make_stack: MakeStack, path: str, body: bytes, connection: str
) -> None:
    stack = make_stack(limits=RequestLimits(send_seconds=1.0), socket_fd=narrow_listener())
    serve_long_name(stack, answer_with(ids("a")))
    with narrow_client(stack) as client:
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: {connection}\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        eventually(lambda: bool(re.search(r"^minisgl:slow_clients_total\S* 1$", metrics(stack), re.MULTILINE)))
        eventually(lambda: not [record for record in in_flight(stack) if record.path == path])
        with contextlib.suppress(ConnectionResetError):
            while client.recv(65536):
                continue


def test_the_send_timeout_restarts_for_each_part(make_stack: MakeStack) -> None:
    stack = make_stack(socket_fd=narrow_listener())
    body = b'{"prompt": "%s"}' % (b"a " * 200_000)
    with narrow_client(stack) as client:
        client.sendall(
            b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )
        answer = client.recv(65536)
        (record,) = [one for one in in_flight(stack) if one.path == "/tokenize"]
        length = answer.index(b"\r\n\r\n") + 4 + int(re.findall(rb"content-length: (\d+)", answer)[0])
        begins = {record.send_started_at}
        while len(answer) < length:
            data = client.recv(65536)
            assert data
            answer += data
            begins.add(record.send_started_at)
    assert len(json.loads(answer.partition(b"\r\n\r\n")[2])["tokens"]) == 200_001
    assert len(begins) > 5


def metrics(stack: FrontendStack) -> str:
    return stack.http.get("/metrics").text


def status(**changes: int) -> Status:
    return status_of(**{"running": 1, "num_pages": 8} | changes)


class Watched:
    """One request at time 0, and the watchdog."""

    def __init__(self, **limits: float) -> None:
        self.requests = RequestTracker(RequestLimits(**limits))  # type: ignore[arg-type]
        self.record, self.stream = self.add(0.0)

    def add(self, started_at: float) -> tuple[RequestRecord, ResponseStream]:
        """Add a request that waits for a place in the batch."""
        record = RequestRecord(request_id="r", method="POST", path="/", started_at=started_at)
        stream = record.stream = ResponseStream(started_at, [(b"r" * 16, 1)])
        stream.phase = "waiting"
        stream.accepted_at = stream.queued_since = started_at
        self.requests.in_flight.add(record)
        return record, stream

    def code_at(self, now: float) -> str:
        check(self.requests, now)
        return self.stream.error.code if isinstance(self.stream.error, ApiError) else ""


async def test_the_total_time_is_limited() -> None:
    watched = Watched(request_seconds=10)
    assert watched.code_at(9.9) == ""
    assert watched.code_at(10.1) == "deadline_exceeded"
    assert watched.requests.metrics.timeouts == {"total": 1}
    assert watched.code_at(20) == "deadline_exceeded"
    assert watched.requests.metrics.timeouts == {"total": 1}, "it fails once"


async def test_time_in_the_queue_is_limited() -> None:
    watched = Watched(queue_seconds=10)
    watched.stream.accepted_at = watched.stream.queued_since = 1.0
    watched.requests.update_engine(None, status(waiting=0), 0.0)
    assert watched.code_at(12) == "", "the queue is empty: the request is being prefilled"
    watched.add(2.0)
    watched.requests.update_engine(None, status(waiting=1, steps=1), 11.0)
    assert watched.code_at(12) == "", "the request in the queue is the later one"
    watched.requests.update_engine(None, status(waiting=2, steps=2), 11.0)
    assert watched.code_at(12) == "queue_timeout"


async def test_a_stalled_engine_fails_its_requests() -> None:
    watched = Watched(stall_seconds=10, continues=False)
    watched.stream.phase = "generating"
    watched.requests.update_engine(None, status(steps=1), 1.0)
    watched.requests.update_engine(None, status(steps=2), 5.0)
    watched.requests.update_engine(None, status(steps=2), 14.0)
    assert watched.code_at(14.9) == ""
    assert watched.code_at(15.1) == "engine_stalled"


async def test_an_answer_that_may_go_on_elsewhere_is_given_the_time_for_it() -> None:
    watched = Watched(stall_seconds=10, queue_seconds=20)
    watched.stream.phase = "generating"
    watched.requests.update_engine(None, status(steps=1), 1.0)
    watched.requests.update_engine(None, status(steps=2), 5.0)
    watched.requests.update_engine(None, status(steps=2), 14.0)
    assert watched.code_at(34.9) == ""
    assert watched.code_at(35.1) == "engine_stalled"


async def test_an_answer_gets_as_much_time_again_when_an_engine_comes() -> None:
    """It may have waited for longer, for the rest of a drain."""
    watched = Watched(stall_seconds=10, queue_seconds=20)
    watched.stream.phase = "generating"
    watched.requests.update_engine(None, None, 1.0)
    assert watched.code_at(200.0) == ""
    watched.requests.wait_anew(watched.stream.choices[0], 200.0)
    watched.requests.update_engine(None, status(steps=1, waiting=1), 200.0)
    assert watched.code_at(229.9) == ""
    watched.requests.update_engine(None, status(steps=2, waiting=1), 230.0)
    assert watched.code_at(230.1) == "engine_stalled"


async def test_a_request_without_a_token_waits_anew_in_the_queue_of_an_engine_that_comes() -> None:
    watched = Watched(queue_seconds=10)
    watched.stream.accepted_at = watched.stream.queued_since = 1.0
    watched.requests.update_engine(None, None, 2.0)
    watched.requests.wait_anew(watched.stream.choices[0], 200.0)
    watched.requests.update_engine(None, status(steps=1, waiting=1), 200.0)
    assert watched.code_at(209.9) == ""
    assert watched.code_at(210.1) == "queue_timeout"


async def test_a_request_without_a_token_outlives_a_stalled_engine() -> None:
    watched = Watched(stall_seconds=10)
    watched.requests.update_engine(None, status(steps=1), 1.0)
    watched.requests.update_engine(None, status(steps=2), 5.0)
    assert watched.code_at(50.0) == "", "the launcher or the router replaces the engine"


async def test_a_preempted_request_that_is_not_resumed_fails() -> None:
    watched = Watched(stall_seconds=10, continues=False)
    watched.stream.phase = "generating"
    watched.stream.last_progress_at = 5.0
    watched.requests.update_engine(None, status(steps=1), 15.0)
    assert watched.code_at(15.5) == "", "tokens without text are not reported"
    watched.requests.update_engine(None, status(steps=2, waiting=1), 15.0)
    assert watched.code_at(15.5) == "engine_stalled"


async def test_unsent_text_of_a_slow_client_is_limited() -> None:
    watched = Watched(unsent_bytes=100)
    dropped = asyncio.Event()
    watched.record.client = cast(ClientConnection, SimpleNamespace(abort=dropped.set))
    watched.record.send_started_at = 1.0
    watched.stream.unsent_characters = 100
    check(watched.requests, 2.0)
    assert not dropped.is_set()
    watched.stream.unsent_characters = 101
    check(watched.requests, 2.0)
    assert dropped.is_set()
    assert watched.requests.metrics.slow_clients.value == 1


def test_a_stream_that_exceeds_its_deadline_ends_in_an_error(make_stack: MakeStack) -> None:
    stack = make_stack()
    stack.scheduler.answer = lambda submit: [Ack(submit.id), row(submit.id, 0, ids("a")[0])]
    request = post(b'{"prompt": "a", "stream": true}')
    with socket.create_connection(("127.0.0.1", stack.server.port), WAIT_SECONDS) as client:
        client.sendall(request)
        answer = b""
        while b'"text":"a"' not in answer:
            data = client.recv(65536)
            assert data, answer
            answer += data
        # Set only now, so that the stream has begun even on a slow machine.
        stack.server._tokenizers.requests.limits = RequestLimits(request_seconds=0.01)
        while data := client.recv(65536):
            answer += data
    assert b'"code":"deadline_exceeded"' in answer
    assert b"[DONE]" not in answer and not answer.endswith(b"0\r\n\r\n")
    assert stack.scheduler.wait_for(Abort)
    whole = stack.http.post("/v1/completions", json={"prompt": "a"})
    assert (whole.status_code, whole.json()["error"]["code"]) == (408, "deadline_exceeded")
