"""Bytes that clients read: streams, failed streams, errors, and their headers."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from typing import Any

import pytest

from minisgl.wire.messages import Ack, Failed, FinishReason, Submit
from support.frontend.fake_scheduler import WAIT_SECONDS, answer_with, row
from support.frontend.retry_after import assert_has_retry_headers
from support.frontend.stack import EOS, FrontendStack, ids

CHAT = {"model": "org/tiny", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "org/tiny", "prompt": "Hi"}
BOTH = pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)], ids=["chat", "completion"]
)

NOTHING = '"stop_reason":null,"matched_stop":null'
CHUNK = 'data: {"id":"chatcmpl-ID","object":"chat.completion.chunk","created":0,"model":"org/tiny","choices":['
TEXT = 'data: {"id":"cmpl-ID","object":"text_completion","created":0,"model":"org/tiny","choices":['
ROLE = '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'


def send(stack: FrontendStack, path: str, body: dict[str, Any], headers: str = "") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", stack.server.port), WAIT_SECONDS)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}"
    head += f"content-length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    return client


def read_until(client: socket.socket, mark: bytes, count: int = 1) -> bytes:
    raw = b""
    while raw.count(mark) < count:
        data = client.recv(65536)
        assert data, f"the connection ended before {mark!r}: {raw!r}"
        raw += data
    return raw


def read(client: socket.socket, raw: bytes = b"") -> tuple[list[str], bytes]:
    """Read until the connection is closed. Return the header lines without the date, and the raw body.

    `raw`: bytes that were read already."""
    with client:
        while data := client.recv(65536):
            raw += data
    head, _, body = raw.partition(b"\r\n\r\n")
    return [line for line in head.decode().split("\r\n") if not line.startswith("date: ")], body


def joined(body: bytes) -> tuple[str, bool]:
    """Return the content of a chunked body, with values that differ by response replaced, and whether it has its last
    chunk."""
    text, ended = b"", False
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        ended = length == 0
        text, body = text + body[:length], body[length + 2 :]
    return re.sub(r'-[0-9a-f]{32}"', '-ID"', re.sub(r'"created":\d+', '"created":0', text.decode())), ended


def streamed(stack: FrontendStack, path: str, body: dict[str, Any]) -> list[str]:
    """Return the events of a complete stream."""
    text, ended = joined(read(send(stack, path, body | {"stream": True}))[1])
    assert ended and text.endswith("\n\n")
    return text.split("\n\n")[:-1]


# Streams


def test_chat_stream(stack: FrontendStack) -> None:
    stack.scheduler.answer = answer_with([*ids("🙂"), -EOS], cached=3)
    # The first three tokens are a part of a character, and have no event.
    assert len(ids("🙂")) == 4
    assert streamed(stack, "/v1/chat/completions", CHAT) == [
        CHUNK + ROLE + "}",
        CHUNK + '{"index":0,"delta":{"content":"🙂"},"logprobs":null,"finish_reason":null}]}',
        CHUNK + f'{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"stop",{NOTHING}}}]}}',
        "data: [DONE]",
    ]
    prompt = len(stack.scheduler.received(Submit)[0].prompt) // 4
    with_usage = streamed(stack, "/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}})
    assert with_usage == [
        CHUNK + ROLE + ',"usage":null}',
        CHUNK + '{"index":0,"delta":{"content":"🙂"},"logprobs":null,"finish_reason":null}],"usage":null}',
        CHUNK + f'{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"stop",{NOTHING}}}],"usage":null}}',
        f'{CHUNK}],"usage":{{"prompt_tokens":{prompt},"completion_tokens":5,"total_tokens":{prompt + 5},'
        '"prompt_tokens_details":{"cached_tokens":3},"completion_tokens_details":{"reasoning_tokens":0},'
        '"reasoning_tokens":0}}',
        "data: [DONE]",
    ]


def test_completion_stream(stack: FrontendStack) -> None:
    stack.scheduler.answer = answer_with(ids("a"))
    assert streamed(stack, "/v1/completions", COMPLETION | {"max_tokens": 1}) == [
        TEXT + '{"index":0,"text":"a","logprobs":null,"finish_reason":null}]}',
        TEXT + f'{{"index":0,"text":"","logprobs":null,"finish_reason":"length",{NOTHING}}}]}}',
        "data: [DONE]",
    ]


def test_each_choice_of_a_stream_is_in_order(stack: FrontendStack) -> None:
    """Events of one index are in order; only the usage belongs to no choice."""
    stack.scheduler.answer = answer_with([*ids("a"), -EOS])
    body = CHAT | {"n": 3, "stream_options": {"include_usage": True}}
    *chunks, usage, done = streamed(stack, "/v1/chat/completions", body)
    assert done == "data: [DONE]" and '"choices":[],' in usage
    for index in range(3):
        assert [chunk for chunk in chunks if f'"index":{index},' in chunk] == [
            CHUNK + f'{{"index":{index},"delta":{delta},"logprobs":null,"finish_reason":{reason}}}],"usage":null}}'
            for delta, reason in (
                ('{"role":"assistant","content":""}', "null"),
                ('{"content":"a"}', "null"),
                ("{}", f'"stop",{NOTHING}'),
            )
        ]


@BOTH
def test_headers_of_a_stream(stack: FrontendStack, path: str, body: dict[str, Any]) -> None:
    stack.scheduler.answer = answer_with([-EOS])
    head, _ = read(send(stack, path, body | {"stream": True, "mystery": 1}, "x-request-id: mine\r\n"))
    assert head[0] == "HTTP/1.1 200 OK"
    assert sorted(head[1:]) == [
        "cache-control: no-cache",
        "connection: close",
        "content-type: text/event-stream; charset=utf-8",
        "transfer-encoding: chunked",
        "x-accel-buffering: no",
        "x-ignored-params: mystery",
        "x-request-id: mine",
    ]


def test_keepalive_comments_of_a_silent_stream(make_stack: Callable[..., FrontendStack]) -> None:
    stack = make_stack(ping_seconds=0.05)
    stack.scheduler.answer = lambda submit: [Ack(submit.id)]
    client = send(stack, "/v1/completions", COMPLETION | {"stream": True, "max_tokens": 1})
    (submit,) = stack.scheduler.wait_for(Submit)
    raw = read_until(client, b"8\r\n: ping\n\n\r\n", count=2)
    stack.scheduler.send(row(submit.id, 0, ids("a")[0], "length"), to=submit)
    _, body = read(client, raw)
    text, ended = joined(body)
    assert ended and text.endswith("data: [DONE]\n\n")
    assert text.startswith(": ping\n\n: ping\n\n")


# Broken streams


def break_off(stack: FrontendStack, path: str, body: dict[str, Any], *messages: Callable[[bytes], Any]) -> str:
    """Return the rest of a stream that has begun and that these messages fail; the last chunk is missing."""
    client = send(stack, path, body | {"stream": True})
    (submit,) = stack.scheduler.wait_for(Submit)
    stack.scheduler.send(Ack(submit.id), to=submit)
    raw = read_until(client, b"\r\n\r\n")
    stack.scheduler.send(*(message(submit.id) for message in messages), to=submit)
    head, rest = read(client, raw)
    assert head[0] == "HTTP/1.1 200 OK"
    text, ended = joined(rest)
    assert not ended, "the last chunk would make it a complete response"
    stack.scheduler.reset()
    return text


@pytest.mark.parametrize("reason", ["abort", "error"])
@BOTH
def test_only_stop_and_length_end_a_complete_response(
    stack: FrontendStack, path: str, body: dict[str, Any], reason: FinishReason
) -> None:
    text = break_off(stack, path, body, lambda request_id: row(request_id, 0, ids("a")[0], reason))
    *_, error, rest = text.split("\n\n")
    assert rest == ""
    assert re.fullmatch(
        r'data: \{"error":\{"message":".+","type":"server_error","param":null,"code":"[a-z_]+"\}\}', error
    )
    assert "[DONE]" not in text and '"finish_reason":"' not in text
    stack.scheduler.answer = lambda submit: [Ack(submit.id), row(submit.id, 0, ids("a")[0], reason)]
    whole = stack.http.post(path, json=body)
    assert whole.status_code >= 500 and whole.json().keys() == {"error"}


def test_a_failed_stream_ends_in_an_error(stack: FrontendStack) -> None:
    text = break_off(
        stack,
        "/v1/chat/completions",
        CHAT,
        lambda request_id: Failed(request_id, "engine_unavailable", "the engine is lost"),
    )
    assert text == (
        f"{CHUNK}{ROLE}}}\n\n"
        'data: {"error":{"message":"the engine is lost","type":"server_error","param":null,'
        '"code":"engine_unavailable"}}\n\n'
    )


# Errors


@pytest.mark.parametrize("stream", [False, True])
@BOTH
def test_a_rejected_request_has_no_success_headers(
    stack: FrontendStack, path: str, body: dict[str, Any], stream: bool
) -> None:
    stack.scheduler.answer = lambda submit: [Failed(submit.id, "queue_full", "9 requests are waiting already")]
    head, raw = read(send(stack, path, body | {"stream": stream}))
    assert head[0] == "HTTP/1.1 429 Too Many Requests"
    headers = dict(line.split(": ", 1) for line in head[1:])
    assert headers["content-type"] == "application/json"
    assert_has_retry_headers(headers)
    assert raw == (
        b'{"error":{"message":"9 requests are waiting already","type":"rate_limit_error","param":null,'
        b'"code":"queue_full"}}'
    )


@pytest.mark.parametrize(
    ("method", "path", "headers", "content", "status", "error"),
    [
        (
            "POST",
            "/v1/completions",
            {},
            b'{"prompt":"a","max_tokens":-1}',
            400,
            '"message":"max_tokens: expected `int` >= 0","type":"invalid_request_error","param":"max_tokens",'
            '"code":"invalid_value"',
        ),
        (
            "POST",
            "/v1/chat/completions",
            {},
            b'{"messages":[{"role":"user","content":"a"},{"content":"a"}]}',
            400,
            '"message":"missing required field \'messages[1].role\'","type":"invalid_request_error",'
            '"param":"messages[1].role","code":"missing_required_parameter"',
        ),
        (
            "POST",
            "/v1/completions",
            {},
            b'{"prompt":"a","max_tokens":256}',
            400,
            '"message":"This model\'s maximum context length is 256 tokens',
        ),
        ("GET", "/v2", {}, b"", 404, '"message":"path not found","type":"not_found_error","param":null,'),
        ("GET", "/v1/models/a/b", {}, b"", 404, '"type":"not_found_error","param":"model","code":"model_not_found"'),
        ("PUT", "/v1/completions", {}, b"", 405, '"param":null,"code":"method_not_allowed"'),
        (
            "POST",
            "/v1/completions",
            {"content-type": "text/plain"},
            b"{}",
            415,
            '"type":"invalid_request_error","param":null,"code":"unsupported_media_type"',
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_error_bodies(
    stack: FrontendStack, method: str, path: str, headers: dict[str, str], content: bytes, status: int, error: str
) -> None:
    response = stack.http.request(method, path, headers=headers, content=content)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert re.fullmatch(
        r'\{"error":\{"message":".+","type":"\w+","param":(null|".+"),"code":"[a-z_]+"\}\}', response.text
    )
    assert error in response.text
    assert response.headers["x-request-id"]


def test_a_declared_size_above_the_limit_is_rejected_immediately(stack: FrontendStack) -> None:
    with socket.create_connection(("127.0.0.1", stack.server.port), WAIT_SECONDS) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000000\r\n\r\n")
        raw = read_until(client, b"}}")
    assert raw.startswith(b"HTTP/1.1 413 ")
    assert raw.endswith(b'"type":"invalid_request_error","param":null,"code":"body_too_large"}}')


def test_the_error_names_the_first_of_many_problems(stack: FrontendStack) -> None:
    response = stack.http.post("/v1/completions", content=b'{"prompt": "a", "top_p": 7, "temperature": "secret"}')
    assert response.text == (
        '{"error":{"message":"top_p: expected `float` <= 1.0","type":"invalid_request_error","param":"top_p",'
        '"code":"invalid_value"}}'
    )


# Identifiers


@pytest.mark.parametrize("stream", [False, True])
@BOTH
def test_a_client_request_id_is_returned_and_used_for_nothing_else(
    stack: FrontendStack, path: str, body: dict[str, Any], stream: bool
) -> None:
    """Two clients may use the same id at the same time."""
    clients = [send(stack, path, body | {"stream": stream}, "x-request-id: mine\r\n") for _ in range(2)]
    submits = stack.scheduler.wait_for(Submit, 2)
    assert len({submit.id for submit in submits}) == 2
    for submit in submits:
        stack.scheduler.send(Ack(submit.id), row(submit.id, 0, EOS, "stop"), to=submit)
    answers = [read(client) for client in clients]
    assert all("x-request-id: mine" in head for head, _ in answers)
    found = [set(re.findall(rb'"id":"(?:chatcmpl|cmpl)-([0-9a-f]{32})"', raw)) for _, raw in answers]
    assert [len(made) for made in found] == [1, 1], "the same in every event"
    assert found[0] != found[1]
