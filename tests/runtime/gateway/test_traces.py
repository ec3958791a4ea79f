"""Traces of requests that pass a gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl.frontend.config import TraceOptions
from minisgl.gateway.config import GatewayOptions
from minisgl.gateway.process import GatewayServer
from support.frontend.fake_scheduler import answer_with
from support.frontend.stack import FrontendStack, ids
from support.gateway.running import gateway_of, running, until
from support.gateway.stub_frontend import Received, stub_frontend
from support.otlp import CollectedSpan, Collector, collector

CHAT = {"model": "qwen", "messages": [{"role": "user", "content": "a secret"}]}
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"traceparent: 00-{TRACE_ID}-b7ad6b7169203331-01\r\ntracestate: vendor=1\r\n"
MINE = "x-request-id: mine\r\n"


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with collector() as made:
        yield made


def all_of(traces: Collector, share: float = 1.0) -> TraceOptions:
    return TraceOptions(endpoint=traces.url, sampling=share)


def own_of(spans: list[CollectedSpan]) -> CollectedSpan:
    (own,) = (span for span in spans if span.kind == "server")
    return own


@pytest.fixture
def make_stack(tmp_path: Path) -> Iterator[Callable[..., FrontendStack]]:
    made: list[FrontendStack] = []

    def make(**options: Any) -> FrontendStack:
        made.append(FrontendStack(tmp_path, **options))
        return made[-1]

    yield make
    for stack in made:
        stack.close()


async def test_gateway_and_frontend_are_in_one_trace(
    make_stack: Callable[..., FrontendStack], traces: Collector
) -> None:
    # The frontend would record nothing by itself.
    stack = make_stack(traces=all_of(traces, 0.0))
    stack.scheduler.answer = answer_with(ids("ok"))
    options = GatewayOptions(
        port=0,
        control_port=0,
        backends=(f"http://127.0.0.1:{stack.server.port}",),
        drain_timeout=0.1,
        traces=all_of(traces),
    )
    async with running(GatewayServer(options)) as gateway:
        body = {**CHAT, "model": "org/tiny", "max_tokens": 2, "stream": True}
        answer = await gateway.post("/v1/chat/completions", body, MINE)
        assert answer.status == 200
    traces.wait_for(lambda spans: sum(span.kind == "server" for span in spans) == 2)
    spans = {(span.service, span.kind): span for span in traces.spans if span.kind != "internal"}
    own = spans["minisgl-gateway", "server"]
    attempt = spans["minisgl-gateway", "client"]
    frontend = spans["minisgl-frontend", "server"]
    assert {span.trace_id for span in traces.spans} == {own.trace_id}
    assert (own.parent_id, attempt.parent_id, frontend.parent_id) == ("", own.span_id, attempt.span_id)
    assert (own.name, attempt.name, frontend.name) == (frontend.name, "POST", "POST /v1/chat/completions")
    assert attempt.attributes == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "server.address": "127.0.0.1",
        "server.port": stack.server.port,
    }
    assert own.attributes["gen_ai.usage.output_tokens"] == frontend.attributes["gen_ai.usage.output_tokens"] == 2
    assert own.attributes["minisgl.request.id"] == frontend.attributes["minisgl.request.id"] == "mine"
    assert b"secret" not in traces.raw


async def test_each_attempt_has_a_span_that_says_why_it_failed(traces: Collector) -> None:
    async def die_twice(request: Received) -> None:
        if len(dying.received) + len(other.received) < 3:
            request.drop()
        else:
            await request.answer(200, {})

    async with (
        stub_frontend("qwen", handler=die_twice) as dying,
        stub_frontend("qwen", handler=die_twice) as other,
        gateway_of(dying, other, traces=all_of(traces)) as gateway,
    ):
        answer = await gateway.post("/v1/chat/completions", CHAT, MINE + PARENT)
        assert answer.status == 200
    spans = traces.trace_of("mine")
    own = own_of(spans)
    attempts = [span for span in spans if span.kind == "client"]
    assert [span.attributes.get("error.type") for span in attempts] == ["frontend_lost", "frontend_lost", None]
    assert [span.attributes.get("http.request.resend_count") for span in attempts] == [None, 1, 2]
    assert {span.parent_id for span in spans if span is not own} == {own.span_id}
    assert (own.trace_id, own.parent_id, own.state, own.failed) == (TRACE_ID, "b7ad6b7169203331", "vendor=1", False)
    received = sorted((*dying.received, *other.received), key=lambda one: _place(attempts, one))
    assert [one.headers["traceparent"] for one in received] == [
        f"00-{TRACE_ID}-{span.span_id}-01" for span in attempts
    ]
    assert {one.headers["tracestate"] for one in received} == {"vendor=1"}


def _place(attempts: list[CollectedSpan], request: Received) -> int:
    return [span.span_id for span in attempts].index(request.headers["traceparent"].split("-")[2])


async def test_the_time_for_which_a_request_is_held_is_a_span(traces: Collector) -> None:
    async with stub_frontend("qwen") as stub, gateway_of(stub, traces=all_of(traces)) as gateway:
        await stub.stop()
        asking = asyncio.create_task(gateway.post("/v1/chat/completions", CHAT, MINE))

        async def is_held() -> bool:
            demand = await gateway.demand("qwen")
            return demand is not None and demand["held"] == 1

        await until(is_held)
        await stub.start()
        assert (await asking).status == 200
    spans = traces.trace_of("mine")
    assert [span.name for span in spans if span.kind == "internal"] == ["held"]
    errors = [span.attributes.get("error.type") for span in spans if span.kind == "client"]
    assert errors[0] == "unreachable" and errors[-1] is None


async def test_what_is_not_recorded_here_is_not_recorded_by_frontends(traces: Collector) -> None:
    async with stub_frontend("qwen") as stub, gateway_of(stub, traces=all_of(traces, 0.0)) as gateway:
        await gateway.post("/v1/chat/completions", CHAT)
        await gateway.post("/v1/chat/completions", CHAT, PARENT.replace("-01", "-00"))
        await gateway.post("/v1/chat/completions", CHAT, MINE + PARENT)
    new, unsampled, sampled = (request.headers for request in stub.received)
    assert new["traceparent"].endswith("-00") and "tracestate" not in new
    assert (unsampled["traceparent"], unsampled["tracestate"]) == (f"00-{TRACE_ID}-b7ad6b7169203331-00", "vendor=1")
    assert sampled["traceparent"].startswith(f"00-{TRACE_ID}-") and sampled["traceparent"].endswith("-01")
    own_of(traces.trace_of("mine"))


async def test_a_gateway_without_traces_passes_those_of_clients_on() -> None:
    async with stub_frontend("qwen") as stub, gateway_of(stub) as gateway:
        await gateway.post("/v1/chat/completions", CHAT, PARENT)
        await gateway.post("/v1/chat/completions", CHAT)
    first, second = (request.headers for request in stub.received)
    assert (first["traceparent"], first["tracestate"]) == (f"00-{TRACE_ID}-b7ad6b7169203331-01", "vendor=1")
    assert "traceparent" not in second


async def test_a_stream_that_breaks_off_is_an_attempt_that_failed(traces: Collector) -> None:
    async def break_off(request: Received) -> None:
        await request.begin_stream()
        await request.piece(b"data: {}\n\n")
        request.drop()

    body = json.dumps({**CHAT, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{MINE}"
    async with stub_frontend("qwen", handler=break_off) as stub, gateway_of(stub, traces=all_of(traces)) as gateway:
        await gateway.raw(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        spans = traces.trace_of("mine")
    (attempt,) = (span for span in spans if span.kind == "client")
    assert attempt.failed and attempt.attributes["error.type"] == "frontend_lost"
    assert attempt.attributes["http.response.status_code"] == 200
    own = own_of(spans)
    assert own.failed and own.attributes["error.type"] == "frontend_lost"
