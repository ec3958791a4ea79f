"""Bytes on the wire: streams, failed streams, and clients that disconnect."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from minisgl.wire.messages import Abort, Ack, Failed, FromScheduler, Submit
from support.frontend.fake_scheduler import WAIT_SECONDS, FakeScheduler, answer_with, row
from support.frontend.stack import EOS, FrontendStack, ids

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
STREAM = CHAT | {"stream": True}


class RawClient:
    """One HTTP/1.1 connection, byte by byte."""

    def __init__(self, stack: FrontendStack) -> None:
        self._socket = socket.create_connection(("127.0.0.1", stack.server.port), WAIT_SECONDS)
        self.received = b""

    def post(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> None:
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + data)

    def read_until(self, mark: bytes) -> bytes:
        while mark not in self.received:
            data = self._socket.recv(65536)
            assert data, f"the connection ended before {mark!r}: {self.received!r}"
            self.received += data
        return self.received

    def take_until(self, mark: bytes) -> bytes:
        """Return the bytes up to `mark`, and keep those after it for the next call."""
        taken, _, self.received = self.read_until(mark).partition(mark)
        return taken + mark

    def read_to_end(self) -> bytes:
        while data := self._socket.recv(65536):
            self.received += data
        return self.received

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def connect(stack: FrontendStack) -> Callable[[], RawClient]:
    return lambda: RawClient(stack)


def events(raw: bytes) -> list[str]:
    """Return the data of each event of a chunked response."""
    _, _, body = raw.partition(b"\r\n\r\n")
    text = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        text, body = text + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return [event.removeprefix("data: ") for event in text.decode().split("\n\n") if event]


def test_a_complete_stream(stack: FrontendStack, connect: Callable[[], RawClient]) -> None:
    stack.scheduler.answer = answer_with([*ids("a\n\n\u2028🙂"), -EOS])
    client = connect()
    client.post(STREAM | {"stream_options": {"include_usage": True}})
    raw = client.read_until(b"\r\n0\r\n\r\n")
    head = raw.partition(b"\r\n\r\n")[0].lower()
    assert head.startswith(b"http/1.1 200 ok")
    assert b"content-type: text/event-stream" in head
    assert b"x-request-id: " in head
    *chunks, done = events(raw)
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    assert parsed[0]["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in parsed[1:-2]) == "a\n\n\u2028🙂"
    end = {"finish_reason": "stop", "stop_reason": None, "matched_stop": None}
    assert parsed[-2]["choices"] == [{"index": 0, "delta": {}, "logprobs": None, **end}]
    assert parsed[-1]["choices"] == []
    assert parsed[-1]["usage"]["completion_tokens"] == len(ids("a\n\n\u2028🙂")) + 1
    assert all(chunk["usage"] is None for chunk in parsed[:-1])
    assert {chunk["object"] for chunk in parsed} == {"chat.completion.chunk"}
    client.post(STREAM)  # the connection is still usable
    client.received = b""
    client.read_until(b"[DONE]")
    client.close()


def test_completion_chunks_without_usage(stack: FrontendStack, connect: Callable[[], RawClient]) -> None:
    stack.scheduler.answer = answer_with(ids("ab"))
    client = connect()
    client.post({"prompt": "x", "max_tokens": 2, "stream": True}, "/v1/completions")
    *chunks, done = events(client.read_until(b"\r\n0\r\n\r\n"))
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    assert "".join(chunk["choices"][0]["text"] for chunk in parsed) == "ab"
    end = {"finish_reason": "length", "stop_reason": None, "matched_stop": None}
    assert parsed[-1]["choices"] == [{"index": 0, "text": "", "logprobs": None, **end}]
    assert all("usage" not in chunk and chunk["object"] == "text_completion" for chunk in parsed)
    client.close()


def test_no_headers_before_the_engine_has_queued_the_request(
    stack: FrontendStack, connect: Callable[[], RawClient]
) -> None:
    client = connect()
    client.post(STREAM)
    (submit,) = stack.scheduler.wait_for(Submit)
    client._socket.settimeout(0.05)
    with pytest.raises(TimeoutError):
        client._socket.recv(1)
    client._socket.settimeout(WAIT_SECONDS)
    stack.scheduler.send(Ack(submit.id), to=submit)
    # Headers and the role precede any token.
    client.read_until(b'"role":"assistant"')
    stack.scheduler.send(row(submit.id, 0, EOS, "stop"), to=submit)
    client.read_until(b"[DONE]")
    client.close()


def test_a_failed_stream_has_an_error_and_no_end(stack: FrontendStack, connect: Callable[[], RawClient]) -> None:
    client = connect()
    client.post(STREAM)
    (submit,) = stack.scheduler.wait_for(Submit)
    stack.scheduler.send(Ack(submit.id), row(submit.id, 0, ids("a")[0]), to=submit)
    client.read_until(b'"content":"a"')
    stack.scheduler.send(Failed(submit.id, "engine_error", "the engine broke"), to=submit)
    raw = client.read_to_end()
    assert b"[DONE]" not in raw
    assert b'finish_reason":"' not in raw
    assert not raw.endswith(b"0\r\n\r\n"), "the last chunk would make it a complete response"
    error = json.loads(events(raw)[-1])["error"]
    assert error == {"message": "the engine broke", "type": "server_error", "param": None, "code": "engine_error"}
    client.close()


def acked(submit: Submit) -> list[FromScheduler]:
    return [Ack(submit.id)]


def first_token(submit: Submit) -> list[FromScheduler]:
    return [Ack(submit.id), row(submit.id, 0, ids("a")[0])]


def nothing(submit: Submit) -> list[FromScheduler]:
    return []


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("answer", [nothing, acked, first_token])
def test_a_disconnect_aborts_the_request_in_every_phase(
    stack: FrontendStack,
    connect: Callable[[], RawClient],
    answer: Callable[[Submit], list[FromScheduler]],
    stream: bool,
) -> None:
    stack.scheduler.answer = answer
    client = connect()
    client.post(CHAT | {"stream": stream})
    (submit,) = stack.scheduler.wait_for(Submit)
    if stream and answer is not nothing:
        client.read_until(b'"content":"a"' if answer is first_token else b'"role"')
    client.close()
    assert stack.scheduler.wait_for(Abort) == [Abort(submit.id)]


def test_a_disconnect_aborts_all_prompts_of_a_request(stack: FrontendStack, connect: Callable[[], RawClient]) -> None:
    stack.scheduler.answer = acked
    client = connect()
    client.post({"prompt": ["a", "b", "c"], "stream": True}, "/v1/completions")
    submits = stack.scheduler.wait_for(Submit, 3)
    client.close()
    assert {abort.id for abort in stack.scheduler.wait_for(Abort, 3)} == {submit.id for submit in submits}


def test_one_failed_prompt_fails_the_request_and_aborts_the_others(
    stack: FrontendStack, connect: Callable[[], RawClient]
) -> None:
    client = connect()
    client.post({"prompt": ["a", "b"]}, "/v1/completions")
    failing, other = stack.scheduler.wait_for(Submit, 2)
    stack.scheduler.send(Ack(other.id), to=other)
    stack.scheduler.send(Failed(failing.id, "engine_error", "the engine broke"), to=failing)
    assert b"the engine broke" in client.read_until(b"}}")
    assert stack.scheduler.wait_for(Abort) == [Abort(other.id)]
    client.close()


def test_a_disconnect_during_the_body_has_no_effect(stack: FrontendStack, connect: Callable[[], RawClient]) -> None:
    client = connect()
    client._socket.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
    client.close()
    assert stack.http.get("/health").status_code == 200


def test_every_token_is_an_event(stack: FrontendStack, connect: Callable[[], RawClient]) -> None:
    stack.scheduler.answer = lambda submit: [Ack(submit.id)]
    client = connect()
    client.post(STREAM | {"max_tokens": 100})
    (submit,) = stack.scheduler.wait_for(Submit)
    client.read_until(b'"role":"assistant"')
    tokens = ids("abcdefghij") * 10
    stack.scheduler.send(*(row(submit.id, index, token) for index, token in enumerate(tokens[:-1])), to=submit)
    stack.scheduler.send(row(submit.id, 99, tokens[-1], "length"), to=submit)
    _, *chunks, end, done = events(client.read_until(b"\r\n0\r\n\r\n"))
    contents = [json.loads(chunk)["choices"][0]["delta"]["content"] for chunk in chunks]
    assert contents == list("abcdefghij") * 10
    assert json.loads(end)["choices"][0]["finish_reason"] == "length"
    assert done == "[DONE]"


def test_pipelined_requests_are_answered_in_order(stack: FrontendStack, connect: Callable[[], RawClient]) -> None:
    stack.scheduler.answer = lambda submit: [Ack(submit.id)]
    client = connect()
    for _ in range(2):
        client.post(STREAM | {"max_tokens": 2})
    for number, text in enumerate("ab"):
        submit = stack.scheduler.wait_for(Submit, number + 1)[number]
        client.read_until(b'"role":"assistant"')
        stack.scheduler.send(row(submit.id, 0, ids(text)[0]), row(submit.id, 1, ids(text)[0], "length"), to=submit)
        *chunks, _ = events(client.take_until(b"\r\n0\r\n\r\n"))
        assert [json.loads(chunk)["choices"][0]["delta"].get("content") for chunk in chunks] == ["", text, text, None]


def test_a_client_that_pauses_gets_the_whole_stream(make_stack: Callable[..., FrontendStack]) -> None:
    with socket.socket() as listener:
        # Connections inherit the size, so that little data fills them.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        stack = make_stack(socket_fd=listener.detach())
    stack.scheduler.close()
    stack.wait_until_served(False)
    # The long name is in every event, which makes them large.
    stack.scheduler = FakeScheduler(stack.scheduler_address, stack.card("long" * 1000), answer_with(ids("abcdefghij")))
    stack.wait_until_served()
    client = RawClient(stack)
    client.post({"prompt": "x", "max_tokens": 200, "stream": True}, "/v1/completions")
    while not re.search(r"request_generation_tokens_sum\S* 200", stack.http.get("/metrics").text):
        continue
    *chunks, end, done = events(client.read_until(b"\r\n0\r\n\r\n"))
    texts = [json.loads(chunk)["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == "abcdefghij" * 20
    assert len(texts) < 200, "texts that had to wait were joined"
    assert json.loads(end)["choices"][0]["finish_reason"] == "length"
    assert done == "[DONE]"
    client.close()


def test_a_slow_client_gets_the_whole_stream(stack: FrontendStack, connect: Callable[[], RawClient]) -> None:
    stack.scheduler.answer = answer_with(ids("a"))
    clients = [connect() for _ in range(8)]
    threads = []
    for client in clients:
        client.post({"prompt": "x", "max_tokens": 200, "stream": True}, "/v1/completions")
    stack.scheduler.wait_for(Submit, 8)
    for client in clients:
        threads.append(threading.Thread(target=client.read_until, args=(b"[DONE]",)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    for client in clients:
        texts = [json.loads(event)["choices"][0]["text"] for event in events(client.received)[:-1]]
        assert "".join(texts) == "a" * 200
        client.close()
