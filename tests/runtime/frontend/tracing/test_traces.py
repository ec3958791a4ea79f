"""Traces of requests to a frontend, as a collector gets them."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import msgspec
import pytest

from minisgl.frontend.config import Access, TraceOptions
from minisgl.frontend.metrics.types import Total
from minisgl.frontend.server.request_record import RequestRecord
from minisgl.frontend.server.request_spans import request_spans
from minisgl.frontend.tracing import tracer
from minisgl.frontend.tracing.request_trace import RequestTrace
from minisgl.wire.messages import Ack, Failed, FirstTokenWait, FromScheduler, Pool, Submit, Tokens
from support.frontend.fake_scheduler import FakeScheduler, pooled_row, row
from support.frontend.served import RUNTIME, eventually, metric_sum
from support.frontend.stack import EOS, FrontendStack, ids
from support.otlp import CollectedSpan, Collector, collector

MakeStack = Callable[..., FrontendStack]

CHAT = {"messages": [{"role": "user", "content": "a secret"}]}
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
UNSAMPLED = f"00-{TRACE_ID}-b7ad6b7169203331-00"
QUEUE, PREFILL = 0.25, 0.5
"""Seconds that engines report: of times before the test began."""
LOCAL = "local engine"
"""Name of an engine that tells none."""


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with collector() as made:
        yield made


def all_of(traces: Collector, share: float | None = 1.0) -> TraceOptions:
    return TraceOptions(endpoint=traces.url, sampling=share)


def first(tokens: Tokens) -> Tokens:
    return msgspec.structs.replace(tokens, waits={0: FirstTokenWait(QUEUE, PREFILL)})


def answer(submit: Submit) -> list[FromScheduler]:
    """Two tokens and an end."""
    at = len(submit.output) // 4
    rows = [row(submit.id, at, ids("o")[0], cached=3), row(submit.id, at + 1, ids("k")[0])]
    return [Ack(submit.id), first(rows[0]), rows[1], row(submit.id, at + 2, EOS, "stop")]


def by_name(spans: list[CollectedSpan]) -> dict[str, CollectedSpan]:
    assert len({span.name for span in spans}) == len(spans), [span.name for span in spans]
    return {span.name: span for span in spans}


@pytest.mark.parametrize("stream", [True, False])
def test_a_chat_has_the_times_of_its_engine(make_stack: MakeStack, traces: Collector, stream: bool) -> None:
    stack = make_stack(traces=all_of(traces))
    stack.scheduler.answer = answer
    response = stack.http.post(
        "/v1/chat/completions",
        json=CHAT | {"stream": stream, "max_tokens": 9},
        headers={"x-request-id": "mine", "authorization": "Bearer sk-key"},
    )
    assert response.status_code == 200
    spans = by_name(traces.trace_of("mine"))
    own = spans.pop("POST /v1/chat/completions")
    assert (own.kind, own.parent_id, own.failed, own.service) == ("server", "", False, "minisgl-frontend")
    tokens = own.attributes.pop("gen_ai.usage.input_tokens")
    assert tokens > 3
    assert own.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "minisgl.request.id": "mine",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "minisgl",
        "gen_ai.request.model": "org/tiny",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ["stop"],
        "minisgl.cached_tokens": 3,
    }
    assert {span.parent_id for span in spans.values()} == {own.span_id}
    assert {span.attributes["minisgl.engine"] for span in spans.values()} == {LOCAL}
    queue, prefill, decode = (spans.pop(name) for name in ("queue", "prefill", "decode"))
    assert not spans
    # The request has not lasted for as long as the engine says; nothing begins before it.
    times = [own.start, queue.start, queue.end, prefill.start, prefill.end, decode.start, decode.end, own.end]
    assert times == sorted(times)
    assert (queue.end, prefill.end) == (prefill.start, decode.start)
    assert b"secret" not in traces.raw and b"sk-key" not in traces.raw
    assert traces.paths == {"/v1/traces"}


def test_the_trace_of_the_client_goes_on(make_stack: MakeStack, traces: Collector) -> None:
    stack = make_stack(traces=all_of(traces, 0.0))
    stack.scheduler.answer = answer
    headers = {"x-request-id": "mine", "traceparent": PARENT, "tracestate": "vendor=1"}
    stack.http.post("/v1/chat/completions", json=CHAT, headers=headers)
    for span in traces.trace_of("mine"):
        assert (span.trace_id, span.state) == (TRACE_ID, "vendor=1")
        assert (span.parent_id == "b7ad6b7169203331") == (span.kind == "server")


@pytest.mark.parametrize(("share", "header"), [(1.0, UNSAMPLED), (0.0, ""), (0.0, "00-bad-01")])
def test_a_request_that_is_not_sampled_has_no_span(
    make_stack: MakeStack, traces: Collector, share: float, header: str
) -> None:
    stack = make_stack(traces=all_of(traces, share))
    stack.scheduler.answer = answer
    headers = {"traceparent": header} if header else {}
    assert stack.http.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 200
    stack.http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "last", "traceparent": PARENT})
    assert {span.attributes.get("minisgl.request.id") for span in traces.trace_of("last")} == {None, "last"}
    assert {span.trace_id for span in traces.spans} == {TRACE_ID}
    assert sum(span.kind == "server" for span in traces.spans) == 1


def test_a_client_that_chooses_the_id_of_its_trace_does_not_choose_to_be_recorded(
    make_stack: MakeStack, traces: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    stack = make_stack(traces=all_of(traces, 1e-9))
    stack.scheduler.answer = answer
    # Of the ids of traces, the one that a share takes first.
    chosen = f"00-{'1'.ljust(32, '0')}-b7ad6b7169203331-01"
    for _ in range(3):
        assert stack.http.post("/v1/chat/completions", json=CHAT, headers={"traceparent": chosen}).status_code == 200
    stack.server.stop()
    stack.join()
    assert not traces.spans


def test_the_gateway_decides_for_a_frontend_that_clients_cannot_reach(
    make_stack: MakeStack, traces: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    stack = make_stack(traces=all_of(traces, 0.0), access=Access(trust_gateway=True))
    stack.scheduler.answer = answer
    stack.http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine", "traceparent": PARENT})
    assert traces.trace_of("mine")[0].trace_id == TRACE_ID


def test_an_answer_that_goes_on_at_another_engine_has_one_trace(make_stack: MakeStack, traces: Collector) -> None:
    stack = make_stack(traces=all_of(traces))
    stack.scheduler.answer = lambda submit: [Ack(submit.id), first(row(submit.id, 0, ids("a")[0]))]
    headers = {"x-request-id": "mine"}
    with stack.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}, headers=headers) as response:
        lines = response.iter_lines()
        next(line for line in lines if '"a"' in line)
        stack.scheduler.close()
        stack.wait_until_served(False)
        stack.scheduler = FakeScheduler(stack.scheduler_address, stack.card("org/tiny"), answer, replica="chat-r1")
        assert "data: [DONE]" in list(lines)
    *below, own = sorted(traces.trace_of("mine"), key=lambda span: span.kind == "server")
    names = ["queue", "prefill", "decode"]
    assert sorted(span.name for span in below) == sorted(2 * names)
    assert {span.parent_id for span in below} == {own.span_id}
    for engine in (LOCAL, "chat-r1"):
        assert sorted(span.name for span in below if span.attributes["minisgl.engine"] == engine) == sorted(names)
    ((event, attributes),) = own.events
    assert (event, attributes["minisgl.engine"]) == ("engine_changed", "chat-r1")
    assert attributes["minisgl.cause"] == "the connection to the engine was lost"
    assert not own.failed and own.attributes["gen_ai.usage.output_tokens"] == 4


def test_a_request_that_fails_says_where(make_stack: MakeStack, traces: Collector) -> None:
    stack = make_stack(traces=all_of(traces))
    stack.scheduler.answer = lambda submit: [Ack(submit.id), Failed(submit.id, "engine_error", "a secret")]
    stack.http.post("/v1/completions", json={"prompt": "Hi"}, headers={"x-request-id": "mine"})
    spans = by_name(traces.trace_of("mine"))
    own = spans["POST /v1/completions"]
    assert own.failed and own.attributes["http.response.status_code"] == 500
    assert (own.attributes["error.type"], own.attributes["minisgl.phase"]) == ("engine_error", "waiting")
    assert set(spans) == {"queue", own.name}
    stack.http.post("/v1/completions", json={"prompt": 1.5}, headers={"x-request-id": "bad"})
    (bad,) = traces.trace_of("bad")
    assert not bad.failed and bad.attributes["http.response.status_code"] == 400
    assert b"secret" not in traces.raw


def test_a_name_of_a_model_that_is_not_known_yet_makes_no_large_span() -> None:
    path = "/v1/completions"
    record = RequestRecord(request_id="mine", method="POST", path=path, route=path, started_at=0.0, model="m" * 100_000)
    (own,) = request_spans(record, RequestTrace(1, 0, ""), 1.0)
    assert 0 < len(str(own.attributes["gen_ai.request.model"])) < 1000


def test_choices_have_spans_of_their_own_up_to_a_number(make_stack: MakeStack, traces: Collector) -> None:
    stack = make_stack(traces=all_of(traces))
    stack.scheduler.answer = answer
    body = {"prompt": "Hi", "n": 20}
    stack.http.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
    spans = traces.trace_of("mine")
    decodes = [span.attributes["minisgl.choice"] for span in spans if span.name == "decode"]
    assert sorted(decodes) == list(range(16))
    own = next(span for span in spans if span.kind == "server")
    assert own.attributes["gen_ai.request.choice.count"] == 20
    assert own.attributes["gen_ai.usage.output_tokens"] == 60


def test_texts_that_are_pooled_have_no_decode(make_stack: MakeStack, traces: Collector) -> None:
    stack = make_stack(traces=all_of(traces), model={"task": "embed", "output_size": 2})

    def pool(request: Pool) -> list[FromScheduler]:
        output = pooled_row(request, [1.0, 0.0])
        return [Ack(request.id), msgspec.structs.replace(output, waits={0: FirstTokenWait(QUEUE, PREFILL)})]

    stack.scheduler.pool = pool
    response = stack.http.post("/v1/embeddings", json={"input": "Hi"}, headers={"x-request-id": "mine"})
    assert response.status_code == 200
    spans = by_name(traces.trace_of("mine"))
    assert set(spans) == {"queue", "prefill", "POST /v1/embeddings"}
    assert spans["POST /v1/embeddings"].attributes["gen_ai.operation.name"] == "embeddings"


def test_variables_of_opentelemetry_configure_traces(
    make_stack: MakeStack, traces: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", traces.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=llm")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.name=other")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    stack = make_stack()
    stack.scheduler.answer = answer
    stack.http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine", "traceparent": UNSAMPLED})
    span = traces.trace_of("mine")[0]
    assert (span.service, span.resource["deployment.environment.name"]) == ("mine", "test")
    assert {"x-team": "llm"}.items() <= {name.lower(): value for name, value in traces.headers[0].items()}.items()


def test_a_dead_collector_costs_spans_and_one_line(
    make_stack: MakeStack, traces: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    stack = make_stack(traces=all_of(traces))
    stack.scheduler.answer = answer

    def lines() -> list[str]:
        # pytest listens to the library's logger itself, which writes nothing.
        return [record.getMessage() for record in caplog.records if record.name.startswith("minisgl.frontend.tracing")]

    # The collector refuses what it gets for good, and the exporter does not try again.
    traces.status = 400
    with caplog.at_level(logging.INFO, "minisgl.frontend.tracing"):
        for _ in range(2):
            before = _dropped(stack)
            assert stack.http.post("/v1/chat/completions", json=CHAT).status_code == 200
            eventually(functools.partial(_have_dropped, stack, before + 4))
        assert [line.partition(",")[0] for line in lines()] == [f"traces cannot be exported to {traces.address}"]
        traces.status = 200
        stack.http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine"})
        traces.trace_of("mine")
        eventually(lambda: lines()[1:] == [f"traces are exported to {traces.address} again"])
    assert _dropped(stack) == 8


def test_a_queue_that_is_full_costs_spans_alone(
    make_stack: MakeStack, traces: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "6")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "6")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    stack = make_stack(traces=all_of(traces))
    stack.scheduler.answer = answer
    for _ in range(2):
        assert stack.http.post("/v1/chat/completions", json=CHAT).status_code == 200
    eventually(lambda: _dropped(stack) == 4)
    stack.server.stop()
    stack.join()
    # What was queued leaves at the end, although its time had not come.
    assert len(traces.spans) == 4


def test_a_collector_that_cannot_be_reached_delays_no_end(
    make_stack: MakeStack, traces: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracer, "CLOSE_SECONDS", 0.1)
    stack = make_stack(traces=all_of(traces))
    stack.scheduler.answer = answer
    # Connections are accepted, and no byte comes back.
    traces.stall()
    assert stack.http.post("/v1/chat/completions", json=CHAT).status_code == 200
    traces.wait_for_request()
    stack.server.stop()
    stack.join()
    traces.go_on()


def _have_dropped(stack: FrontendStack, spans: float) -> bool:
    return _dropped(stack) == spans


def _dropped(stack: FrontendStack) -> float:
    return metric_sum(stack.http.get("/metrics").text, "minisgl:trace_spans_dropped_total")


@pytest.mark.parametrize(
    ("variables", "is_on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://localhost:1/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1", "OTEL_TRACES_SAMPLER": "unknown"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://[::1"}, True),
        *(
            ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1", "OTEL_BSP_MAX_QUEUE_SIZE": size}, True)
            for size in ("100", "0", "many")
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1", "OTEL_BSP_SCHEDULE_DELAY": "0"}, False),
    ],
)
def test_an_endpoint_turns_traces_on(
    variables: dict[str, str], is_on: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    made = tracer.create_tracer(TraceOptions(), "minisgl-frontend", Total("spans", "Spans."))
    assert (made is not None) == is_on
    if made is not None:
        made.close()
    assert ("there are no traces: a variable" in caplog.text) == ("OTEL_BSP_SCHEDULE_DELAY" in variables)
    assert ("OTEL_TRACES_SAMPLER=unknown is not known" in caplog.text) == ("OTEL_TRACES_SAMPLER" in variables)


def test_nothing_is_imported_without_a_collector() -> None:
    code = (
        "import sys; from minisgl.frontend.config import FrontendConfig; import minisgl.gateway.process;"
        "from minisgl.frontend.process import FrontendServer;"
        "FrontendServer(FrontendConfig(port=0, tokenizer_addresses=('ipc:///tmp/none',)));"
        "print(*(name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environment["PYTHONPATH"] = str(RUNTIME)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert (done.stdout.split(), done.stderr) == ([], "")
