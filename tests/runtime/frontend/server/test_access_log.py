"""One line for each request, without any text of prompts and responses."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from minisgl.frontend.server import connection
from minisgl.wire.messages import Ack, FirstTokenWait, FromScheduler, Submit
from support.frontend.fake_scheduler import WAIT_SECONDS, answer_with, row
from support.frontend.stack import FrontendStack, ids

CHAT = {"messages": [{"role": "user", "content": "a secret"}]}

MakeStack = Callable[..., FrontendStack]


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def wait_for(self, count: int) -> list[tuple[str, dict[str, Any]]]:
        """Return message and fields of `count` lines, once they are there: a line follows its response."""
        deadline = time.monotonic() + WAIT_SECONDS
        while len(self.records) < count:
            assert time.monotonic() < deadline, self.records
            time.sleep(0.01)
        assert len(self.records) == count
        standard = {*vars(logging.makeLogRecord({})), "message"}
        return [
            (record.getMessage(), {key: value for key, value in vars(record).items() if key not in standard})
            for record in self.records
        ]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines()
    logger = logging.getLogger("minisgl.frontend.access_log")
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_text_of_clients_is_escaped(make_stack: MakeStack, lines: Lines) -> None:
    stack = make_stack()
    stack.http.get("/a%0a10:00:00%20error%20%1b[31m")
    stack.http.get(f"/{'é' * 300}")
    found = [fields for _, fields in lines.wait_for(2)]
    assert found[0]["path"] == r"/a\n10:00:00 error \x1b[31m"
    assert found[1]["path"] == f"/{'é' * 255}…"


def test_a_completed_request(make_stack: MakeStack, lines: Lines) -> None:
    stack = make_stack()
    stack.scheduler.answer = answer_with(ids("ok"), cached=3)
    headers = {"x-request-id": "mine", "x-stainless-retry-count": "1", "traceparent": "00-ab-cd-01"}
    stack.http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 2}, headers=headers)
    ((message, fields),) = lines.wait_for(1)
    assert message == "answered"
    times = {name: fields.pop(name) for name in ("accepted_ms", "first_token_ms", "total_ms")}
    assert 0 < times["accepted_ms"] <= times["first_token_ms"] <= times["total_ms"]
    assert fields.pop("prompt_tokens") > 3
    assert fields == {
        "request_id": "mine",
        "method": "POST",
        "path": "/v1/chat/completions",
        "model": "org/tiny",
        "status": 200,
        "retry": "1",
        "trace": "00-ab-cd-01",
        "cached_tokens": 3,
        "completion_tokens": 2,
        "finish_reason": "length",
    }


def test_time_in_the_queue_and_of_prefill(make_stack: MakeStack, lines: Lines) -> None:
    stack = make_stack()
    waits = iter((0.25, 1.5))

    def answer(submit: Submit) -> list[FromScheduler]:
        first = row(submit.id, 0, ids("a")[0], "length")
        return [Ack(submit.id), msgspec.structs.replace(first, waits={0: FirstTokenWait(next(waits), 0.75)})]

    stack.scheduler.answer = answer
    stack.http.post("/v1/completions", json={"model": "default", "prompt": "a", "max_tokens": 1, "n": 2})
    ((_, fields),) = lines.wait_for(1)
    assert (fields["queue_ms"], fields["model"]) == (1500.0, "default")
    page = stack.http.get("/metrics").text
    prefill = 'vllm:request_prefill_time_seconds_sum{model_name="org/tiny",engine="0"}'
    assert f"{prefill} 1.5\n" in page


def test_probes_are_not_logged_and_errors_are(make_stack: MakeStack, lines: Lines) -> None:
    stack = make_stack()
    for path in ("/health", "/ready", "/metrics"):
        stack.http.get(path)
    stack.http.post("/v1/completions", json={"prompt": "a secret", "temperature": "a secret"})
    ((message, fields),) = lines.wait_for(1)
    assert message == "failed"
    assert (fields["status"], fields["code"], fields["phase"]) == (400, "invalid_value", "reading")
    assert "secret" not in str(fields)


def test_a_disconnected_client(make_stack: MakeStack, lines: Lines) -> None:
    stack = make_stack()
    stack.scheduler.answer = lambda submit: [Ack(submit.id), row(submit.id, 0, ids("a")[0])]
    with stack.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as response:
        next(line for line in response.iter_lines() if '"content":"a"' in line)
    ((message, fields),) = lines.wait_for(1)
    assert message == "aborted: the client left"
    assert (fields["status"], fields["phase"]) == (200, "generating")
    assert fields["request_id"] == response.headers["x-request-id"]


def test_a_stream_that_ends_in_an_error(make_stack: MakeStack, lines: Lines) -> None:
    stack = make_stack(drain_seconds=0.1)
    stack.scheduler.answer = lambda submit: [Ack(submit.id), row(submit.id, 0, ids("a")[0])]
    stack.http.timeout = WAIT_SECONDS
    with (
        pytest.raises(Exception, match=r"peer closed|incomplete"),
        stack.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as response,
    ):
        lines_of_answer = response.iter_lines()
        next(line for line in lines_of_answer if '"content":"a"' in line)
        stack.server.stop()
        list(lines_of_answer)
    ((message, fields),) = lines.wait_for(1)
    assert (message, fields["code"], fields["phase"]) == ("failed", "shutting_down", "generating")


@pytest.mark.parametrize(
    ("sent", "status", "code", "path"),
    [
        (
            b"GET /v1/models?a HTTP/1.1\r\nx-request-id: mine\r\nx: " + b"a" * 40_000,
            431,
            "headers_too_large",
            True,
        ),
        (b"GET /v1/models HTTP/1.1\r\nx-request-id: mine\r\ncontent-length: -1\r\n\r\n", 400, "invalid_http", True),
        (b"GET /v1/models HTTP/1.1\r\nx-request-id: mine\r\nhost:", 408, "head_timeout", True),
        (b"\x16\x03\x01\x02\x00", 400, "invalid_http", False),
        (
            b"GET /v1/models HTTP/1.1\r\nx-request-id: mine\r\ntransfer-encoding: xchunked\r\n\r\n",
            501,
            "unsupported_transfer_encoding",
            True,
        ),
    ],
    ids=["large", "wrong", "late", "no HTTP", "encoding"],
)
def test_requests_rejected_by_the_parser_are_logged_and_counted(
    make_stack: MakeStack,
    lines: Lines,
    monkeypatch: pytest.MonkeyPatch,
    sent: bytes,
    status: int,
    code: str,
    path: bool,
) -> None:
    if code == "head_timeout":
        monkeypatch.setattr(connection, "HEADER_SECONDS", 0.5)
    stack = make_stack()
    with socket.create_connection(("127.0.0.1", stack.server.port), WAIT_SECONDS) as client:
        client.sendall(sent)
        answer = b""
        while data := client.recv(65536):
            answer += data
    ((message, fields),) = lines.wait_for(1)
    assert (message, fields["status"], fields["code"]) == ("failed", status, code)
    assert b"\r\nx-request-id: %s\r\n" % fields["request_id"].encode() in answer
    if path:
        assert (fields["method"], fields["path"], fields["request_id"]) == ("GET", "/v1/models", "mine")
    else:
        assert (fields["method"], fields["path"], len(fields["request_id"])) == ("", "", 32)
    assert f'code="{code}"}} 1\n' in stack.http.get("/metrics").text


def test_control_characters_do_not_reach_the_log(make_stack: MakeStack, lines: Lines) -> None:
    stack = make_stack()
    stack.http.get("/v1/models", headers={"traceparent": "x" * 200, "x-request-id": "with space"})
    ((_, fields),) = lines.wait_for(1)
    assert "trace" not in fields
    assert len(fields["request_id"]) == 32
