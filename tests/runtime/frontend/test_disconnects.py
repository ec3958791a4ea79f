"""Clients that disconnect: in every phase, what the request holds is freed immediately."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from typing import Any

import pytest

from minisgl.wire.messages import Abort, Ack, Submit
from support.frontend.fake_scheduler import WAIT_SECONDS, row
from support.frontend.served import eventually
from support.frontend.stack import FrontendStack, ids

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}

MakeStack = Callable[..., FrontendStack]


def connect(stack: FrontendStack) -> socket.socket:
    return socket.create_connection(("127.0.0.1", stack.server.port), WAIT_SECONDS)


def post(body: dict[str, Any], path: str = "/v1/chat/completions") -> bytes:
    content = json.dumps(body).encode()
    head = b"POST %s HTTP/1.1\r\nhost: localhost\r\n" % path.encode()
    return head + b"content-length: %d\r\n\r\n%s" % (len(content), content)


def metric(stack: FrontendStack, line: str) -> float:
    """Return the value on the line of /metrics that matches, 0 without one."""
    found = re.search(rf"^{line} (\S+)$", stack.http.get("/metrics").text, re.MULTILINE)
    return float(found.group(1)) if found else 0.0


def disconnects(stack: FrontendStack, phase: str) -> float:
    return metric(stack, rf'minisgl:disconnects_total{{.*phase="{phase}"}}')


def assert_left(stack: FrontendStack, phase: str) -> None:
    eventually(lambda: disconnects(stack, phase) == 1)
    # Only the scrape itself is in progress.
    for each, count in (("reading", 1), ("tokenizing", 0), ("waiting", 0), ("generating", 0)):
        assert metric(stack, rf'minisgl:frontend_inflight{{.*phase="{each}"}}') == count, each


def test_disconnect_while_the_body_is_sent(make_stack: MakeStack) -> None:
    stack = make_stack()
    with connect(stack) as client:
        client.sendall(post(CHAT)[:-5])
        eventually(lambda: metric(stack, r'minisgl:frontend_inflight{.*phase="reading"}') == 2)
    assert_left(stack, "reading")
    assert not stack.scheduler.received(Submit)


def test_disconnect_before_the_scheduler_has_queued_the_request(make_stack: MakeStack) -> None:
    stack = make_stack()
    with connect(stack) as client:
        client.sendall(post(CHAT))
        (submit,) = stack.scheduler.wait_for(Submit)
    assert stack.scheduler.wait_for(Abort)[0].id == submit.id
    assert_left(stack, "tokenizing")


def test_disconnect_while_the_prompt_is_encoded(make_stack: MakeStack) -> None:
    stack = make_stack(max_model_len=1 << 20)
    with connect(stack) as client:
        client.sendall(post({"prompt": "a b " * 400_000}, "/v1/completions"))
        eventually(lambda: metric(stack, r'minisgl:frontend_inflight{.*phase="tokenizing"}') == 1)
    assert_left(stack, "tokenizing")
    assert stack.http.post("/tokenize", json={"prompt": "a"}).status_code == 200, "the worker still runs"
    assert not stack.scheduler.received(Submit)


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_before_the_first_token(make_stack: MakeStack, stream: bool) -> None:
    stack = make_stack()
    stack.scheduler.answer = lambda submit: [Ack(submit.id)]
    with connect(stack) as client:
        client.sendall(post(CHAT | {"stream": stream}))
        eventually(lambda: metric(stack, r'minisgl:frontend_inflight{.*phase="waiting"}') == 1)
    assert stack.scheduler.wait_for(Abort)[0].id == stack.scheduler.received(Submit)[0].id
    assert_left(stack, "waiting")


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_during_the_response(make_stack: MakeStack, stream: bool) -> None:
    stack = make_stack()
    stack.scheduler.answer = lambda submit: [Ack(submit.id), row(submit.id, 0, ids("a")[0])]
    with connect(stack) as client:
        client.sendall(post(CHAT | {"stream": stream}))
        eventually(lambda: metric(stack, r'minisgl:frontend_inflight{.*phase="generating"}') == 1)
    assert stack.scheduler.wait_for(Abort)[0].id == stack.scheduler.received(Submit)[0].id
    assert_left(stack, "generating")
    assert metric(stack, r'vllm:request_success_total{.*finished_reason="abort"}') == 1


def test_closing_after_the_response_is_not_a_disconnect(make_stack: MakeStack) -> None:
    stack = make_stack()
    stack.scheduler.answer = lambda submit: [Ack(submit.id), row(submit.id, 0, ids("a")[0], "length")]
    with connect(stack) as client:
        client.sendall(post(CHAT | {"max_tokens": 1}))
        assert b"200 OK" in client.recv(65536)
    eventually(lambda: metric(stack, r'vllm:request_success_total{.*finished_reason="length"}') == 1)
    stack.http.get("/v1/models")
    assert "disconnects_total{" not in stack.http.get("/metrics").text
    assert not stack.scheduler.received(Abort)


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_with_a_pipelined_request(make_stack: MakeStack, stream: bool) -> None:
    stack = make_stack()
    stack.scheduler.answer = lambda submit: [Ack(submit.id), row(submit.id, 0, ids("a")[0])]
    with connect(stack) as client:
        client.sendall(post(CHAT | {"stream": stream}) * 2)
        (submit,) = stack.scheduler.wait_for(Submit)
        eventually(lambda: metric(stack, r'minisgl:frontend_inflight{.*phase="generating"}') == 1)
    (abort,) = stack.scheduler.wait_for(Abort)
    assert abort.id == submit.id
    eventually(lambda: metric(stack, r'minisgl:frontend_inflight{.*phase="generating"}') == 0)
    assert len(stack.scheduler.received(Submit)) == 1
