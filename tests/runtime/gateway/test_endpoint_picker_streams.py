"""The gateway as an endpoint picker: keys, limits, waiting, and streams that break or never end."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from minisgl.frontend.config import RequestLimits, TraceOptions
from minisgl.gateway import bodies, process
from minisgl.gateway.config import GatewayLimits, OidcOptions
from minisgl.gateway.endpoint_picker import server
from minisgl.gateway.endpoint_picker.messages import SERVICE
from support.gateway.identity_provider import AUDIENCE, identity_provider
from support.gateway.proxy import (
    BODY,
    BUFFERED,
    CHAT,
    ELSEWHERE,
    FULL_DUPLEX,
    SERVING,
    Exchange,
    Proxy,
    at,
    gone,
    held,
    idle,
    picked,
    picker_of,
    refused,
    request_body,
    request_headers,
    response_body,
    response_headers,
    set_headers,
    shows,
)
from support.gateway.running import RunningGateway, until
from support.gateway.stub_frontend import StubFrontend, stub_frontend
from support.otlp import collector

KEYS = """
tenants:
- {name: search, keys: [sk-search], models: [a], tokensPerMinute: 100, priority: 4}
- {name: one, keys: [sk-one], maxConcurrent: 1}
"""
SEARCH, ONE = {"authorization": "Bearer sk-search"}, {"x_api_key": "sk-one"}
NONE_IN_FLIGHT = 'gateway_inflight{component="gateway"} 0\n'
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
async def stubs() -> AsyncIterator[tuple[StubFrontend, StubFrontend]]:
    """Two frontends of the model `a`."""
    async with stub_frontend("a") as first, stub_frontend("a") as second:
        yield first, second


@pytest.fixture
def keys(tmp_path: Path) -> str:
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS)
    return str(file)


def limit(monkeypatch: pytest.MonkeyPatch, **limits: Any) -> None:
    """Give a gateway other limits than its options have."""
    monkeypatch.setattr(process, "RequestLimits", partial(RequestLimits, **limits))


# Keys, limits and waiting


async def test_keys_are_checked_and_end_at_the_picker(stubs: tuple[StubFrontend, StubFrontend], keys: str) -> None:
    async with stub_frontend("b") as other, picker_of(*stubs, other, keys=keys) as (_, proxy):
        response = await proxy.exchange().ask(BODY)
        assert refused(response) == (401, "missing_api_key")
        sent = {each.header.key for each in response.immediate_response.headers.set_headers}
        assert "www-authenticate" in sent and "connection" not in sent
        assert refused(await proxy.exchange().ask(BODY, authorization="Bearer sk-x")) == (401, "invalid_api_key")
        assert refused(await proxy.exchange().ask({"model": "b"}, **SEARCH)) == (404, "model_not_found")
        exchange = proxy.exchange()
        response = await exchange.ask(BODY, x_minisgl_tenant="other", x_minisgl_usage="1", **SEARCH)
        common = response.request_headers.response
        assert set(common.header_mutation.remove_headers) == {"authorization", "x-minisgl-usage"}
        sent_on = set_headers(common)
        assert (sent_on["x-minisgl-tenant"], sent_on["x-minisgl-priority"]) == ("key search", "4")


async def test_an_access_token_names_a_tenant_and_ends_at_the_picker(
    stubs: tuple[StubFrontend, StubFrontend], keys: str
) -> None:
    async with identity_provider() as issuer:
        oidc = OidcOptions(issuer=issuer.issuer, audiences=(AUDIENCE,))
        async with picker_of(*stubs, keys=keys, oidc=oidc) as (_, proxy):
            response = await proxy.exchange().ask(BODY, authorization=f"Bearer {issuer.token()}")
            common = response.request_headers.response
            assert set_headers(common)["x-minisgl-tenant"] == "key search"
            assert "authorization" in common.header_mutation.remove_headers
            expired = await proxy.exchange().ask(BODY, authorization=f"Bearer {issuer.token(exp=1)}")
            assert refused(expired) == (401, "expired_token")


async def test_a_client_without_a_key_is_told_apart_by_the_address_that_the_proxy_adds(
    stubs: tuple[StubFrontend, StubFrontend],
) -> None:
    async with picker_of(*stubs) as (_, proxy):
        for given, tenant in (("192.0.2.9, 192.0.2.1", "192.0.2.1"), ("x\ny", ""), ("2001:DB8::1", "2001:db8::/64")):
            response = await proxy.exchange().ask(BODY, x_forwarded_for=given)
            common = response.request_headers.response
            assert set_headers(common)["x-minisgl-tenant"] == f"address {tenant}"
            assert "x-forwarded-for" not in {*set_headers(common), *common.header_mutation.remove_headers}


async def test_a_request_that_goes_round_between_gateways_ends(stubs: tuple[StubFrontend, StubFrontend]) -> None:
    async with picker_of(*stubs) as (_, proxy):
        response = await proxy.exchange().ask(BODY, x_minisgl_hops="3")
        assert set_headers(response.request_headers.response)["x-minisgl-hops"] == "4"
        assert refused(await proxy.exchange().ask(BODY, x_minisgl_hops="4")) == (508, "loop_detected")


async def test_requests_in_flight_are_limited(
    stubs: tuple[StubFrontend, StubFrontend], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, in_flight=1)
    async with picker_of(*stubs) as (gateway, proxy):
        running = proxy.exchange()
        await running.pick(BODY)
        response = await proxy.exchange().ask(BODY)
        assert refused(response) == (429, "too_many_requests")
        assert (await gateway.post(CHAT, BODY)).code == "too_many_requests", "its API has the same places"
        await running.finish()
        await proxy.exchange().pick(BODY)


async def test_streams_are_limited_whatever_they_send(
    stubs: tuple[StubFrontend, StubFrontend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_MAX_STREAMS", 1)
    async with picker_of(*stubs) as (_, proxy):
        running = proxy.exchange()
        await running.pick(BODY)
        response = await proxy.exchange().read()
        assert refused(response) == (429, "queue_full")
        assert "retry-after" in {each.header.key for each in response.immediate_response.headers.set_headers}
        await running.finish()
        await proxy.exchange().pick(BODY)


async def test_bodies_have_room_until_they_are_on_their_way(
    stubs: tuple[StubFrontend, StubFrontend], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.dumps(BODY | {"x": "y" * 200}).encode()
    monkeypatch.setattr(bodies, "_KEPT_BYTES", 300)
    async with picker_of(*stubs) as (_, proxy):
        for _ in range(3):
            await proxy.exchange().pick(body)
        incomplete = proxy.exchange()
        await incomplete.send(request_headers())
        for piece in (body[:-2], body[-2:-1]):
            await incomplete.send(request_body(piece, end=False))

        async def is_kept() -> bool:
            response = await proxy.exchange().ask(body)
            return response.HasField("immediate_response") and refused(response) == (429, "queue_full")

        await until(is_kept)
        await incomplete.send(request_body(body[-1:], end=True))
        assert picked(await incomplete.read())
        await incomplete.whole_body()
        await proxy.exchange().pick(body)


async def test_headers_that_are_too_large_are_refused(stubs: tuple[StubFrontend, StubFrontend]) -> None:
    async with picker_of(*stubs) as (_, proxy):
        response = await proxy.exchange().ask(BODY, x_large="x" * (32 << 10))
        assert refused(response) == (431, "headers_too_large")


async def test_limits_of_a_tenant_are_kept(stubs: tuple[StubFrontend, StubFrontend], keys: str) -> None:
    async with picker_of(*stubs, keys=keys) as (_, proxy):
        running = proxy.exchange()
        await running.pick(BODY, **ONE)
        response = await proxy.exchange().ask(BODY, **ONE)
        assert refused(response) == (429, "rate_limit_exceeded")
        await running.finish()
        await proxy.exchange().pick(BODY, **ONE)
        used = proxy.exchange()
        await used.pick(BODY, **SEARCH)
        report = '{"prompt_tokens":100,"completion_tokens":40}'
        await used.send(response_headers(x_minisgl_usage=report, end=True))
        answered = (await used.read()).response_headers.response
        assert "x-minisgl-usage" in answered.header_mutation.remove_headers
        assert set_headers(answered)["x-ratelimit-limit-tokens"] == "100"
        await used.finish()
        assert refused(await proxy.exchange().ask(BODY, **SEARCH)) == (429, "rate_limit_exceeded")


async def test_a_model_without_endpoints_is_woken_and_its_requests_wait() -> None:
    async with stub_frontend("a") as stub, picker_of(stub) as (gateway, proxy):
        await gone(gateway, stub)
        exchange, with_subset = proxy.exchange(), proxy.exchange()
        for each, subset in ((exchange, None), (with_subset, [ELSEWHERE])):
            await each.send(request_headers(subset=subset))
            await each.send(request_body(json.dumps(BODY).encode(), end=True))
        await until(lambda: held(gateway, 2))
        await stub.start()
        assert picked(await exchange.read()) == [at(stub)]
        assert refused(await with_subset.read()) == (503, "engine_unavailable"), "it came after the subset"
        await exchange.whole_body()
        await exchange.finish()
        await until(lambda: idle(gateway))


async def held_exchange(gateway: RunningGateway, proxy: Proxy) -> Exchange:
    """A request that waits for an endpoint."""
    exchange = proxy.exchange()
    await exchange.send(request_headers())
    await exchange.send(request_body(json.dumps(BODY).encode(), end=True))
    await until(lambda: held(gateway))
    return exchange


async def test_a_client_that_leaves_while_it_waits_frees_its_place() -> None:
    async with stub_frontend("a") as stub, picker_of(stub) as (gateway, proxy):
        await gone(gateway, stub)
        exchange = await held_exchange(gateway, proxy)
        exchange.call.cancel()
        await until(lambda: idle(gateway))
        await until(lambda: shows(gateway, NONE_IN_FLIGHT))


async def test_a_stream_that_ends_while_it_waits_frees_its_place_and_permits_nothing() -> None:
    """To a proxy the end of a stream without an error means that the request may go on."""
    async with stub_frontend("a") as stub, picker_of(stub) as (gateway, proxy):
        await gone(gateway, stub)
        exchange = await held_exchange(gateway, proxy)
        await exchange.call.done_writing()
        assert await ends_in(exchange) == grpc.StatusCode.CANCELLED
        await until(lambda: idle(gateway))
        await until(lambda: shows(gateway, NONE_IN_FLIGHT))


async def test_a_request_that_waits_is_refused_when_the_picker_has_no_more_time_for_it() -> None:
    async with stub_frontend("a") as stub, picker_of(stub, drain_timeout=0.1) as (gateway, proxy):
        await gone(gateway, stub)
        exchange = await held_exchange(gateway, proxy)
        gateway.server.stop()
        assert refused(await exchange.read()) == (503, "shutting_down")


async def test_what_comes_too_early_is_judged_when_the_request_is_on_its_way() -> None:
    async with stub_frontend("a") as stub, picker_of(stub) as (gateway, proxy):
        await gone(gateway, stub)
        exchange = proxy.exchange()
        await exchange.send(request_headers())
        await exchange.send(request_body(json.dumps(BODY).encode(), end=True))
        await exchange.send(response_headers(end=True))
        await until(lambda: held(gateway))
        await stub.start()
        assert picked(await exchange.read()) == [at(stub)]
        await exchange.whole_body()
        assert (await exchange.read()).WhichOneof("response") == "response_headers"
        await exchange.finish()


async def test_a_client_that_leaves_in_the_middle_of_a_response_is_counted(
    stubs: tuple[StubFrontend, StubFrontend],
) -> None:
    async with picker_of(*stubs) as (gateway, proxy):
        exchange = proxy.exchange()
        await exchange.pick(BODY)
        report = '{"prompt_tokens":7,"completion_tokens":0}'
        await exchange.send(response_headers(content_type="text/event-stream", x_minisgl_usage=report))
        await exchange.read()
        await exchange.send(response_body(b"data: 1\n\ndata: 2\n\n"))
        await exchange.read()
        await exchange.finish()
        labels = 'component="gateway",tenant="anyone",model="a"'
        for line in (
            'disconnects_total{component="gateway",phase="reading"} 1\n',
            f"gateway_prompt_tokens_total{{{labels}}} 7\n",
            f"gateway_completion_tokens_total{{{labels}}} 2\n",
        ):
            assert await shows(gateway, line), line


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_request_ends_at_its_time_limit(has_begun: bool) -> None:
    limits = GatewayLimits(request_seconds=0.3)
    async with stub_frontend("a") as stub, picker_of(stub, limits=limits) as (_, proxy):
        exchange = proxy.exchange()
        if has_begun:
            await exchange.pick(BODY)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await exchange.read()
            assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        else:
            await exchange.send(request_headers())
            assert refused(await exchange.read()) == (408, "deadline_exceeded")


# Streams that are no request


async def test_messages_in_a_wrong_order_end_their_stream_only(stubs: tuple[StubFrontend, StubFrontend]) -> None:
    empty = type(request_headers())()
    async with picker_of(*stubs) as (_, proxy):
        running = proxy.exchange()
        await running.pick(BODY)
        for sent in (
            [request_body(b"{}", end=True)],
            [response_headers()],
            [request_headers(), request_headers()],
            [request_headers(), response_headers()],
            [empty],
            [request_headers(), empty],
        ):
            await is_invalid(proxy.exchange(), sent)
        await running.send(response_headers(end=True))
        assert (await running.read()).WhichOneof("response") == "response_headers"
        await running.finish()


async def test_a_second_body_ends_its_stream(stubs: tuple[StubFrontend, StubFrontend]) -> None:
    async with picker_of(*stubs) as (_, proxy):
        exchange = proxy.exchange()
        await exchange.pick(BODY)
        await is_invalid(exchange, [request_body(b"{}", end=True)])


async def test_a_stream_that_ends_early_frees_what_it_held(stubs: tuple[StubFrontend, StubFrontend]) -> None:
    async with picker_of(*stubs) as (gateway, proxy):
        empty = proxy.exchange()
        await empty.finish()
        for messages in ([request_headers()], [request_headers(), request_body(b"{", end=False)]):
            exchange = proxy.exchange()
            for message in messages:
                await exchange.send(message)
            await exchange.call.done_writing()
            assert await ends_in(exchange) == grpc.StatusCode.CANCELLED
        await until(lambda: shows(gateway, NONE_IN_FLIGHT))
        assert not (await gateway.control("/gateway/status"))["models"]


async def test_a_stream_that_does_not_begin_ends_in_time(
    stubs: tuple[StubFrontend, StubFrontend], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, body_seconds=0.1)
    async with picker_of(*stubs) as (_, proxy):
        assert await ends_in(proxy.exchange()) == grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("mode", [BUFFERED, FULL_DUPLEX])
async def test_a_body_that_does_not_end_is_refused_in_time(
    stubs: tuple[StubFrontend, StubFrontend], monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    limit(monkeypatch, body_seconds=0.1)
    async with picker_of(*stubs) as (_, proxy):
        exchange = proxy.exchange()
        await exchange.send(request_headers(mode=mode))
        if mode == BUFFERED:
            assert (await exchange.read()).HasField("request_headers")
        assert refused(await exchange.read()) == (408, "body_timeout")


async def test_bytes_that_are_no_message_end_their_stream(stubs: tuple[StubFrontend, StubFrontend]) -> None:
    async with picker_of(*stubs) as (_, proxy):
        call = proxy.channel.stream_stream(f"/{SERVICE}/Process")()
        await call.write(b"\xff\xff\xff")
        assert await ends_in(Exchange(call)) == grpc.StatusCode.INVALID_ARGUMENT
        assert await proxy.health("readiness") == SERVING


# Traces


async def test_frontends_join_the_trace_of_a_request() -> None:
    with collector() as traces:
        recorded = TraceOptions(endpoint=traces.url, sampling=1.0)
        async with stub_frontend("a") as stub, picker_of(stub, traces=recorded) as (gateway, proxy):
            await gone(gateway, stub)
            exchange = proxy.exchange()
            parent = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=1"}
            await exchange.send(request_headers(x_request_id="mine", **parent))
            await exchange.send(request_body(json.dumps(BODY).encode(), end=True))
            await until(lambda: held(gateway))
            await stub.start()
            sent_on = set_headers((await exchange.read()).request_headers.response)
            await exchange.whole_body()
            report = '{"prompt_tokens":7,"completion_tokens":2}'
            await exchange.send(response_headers(x_minisgl_usage=report, end=True))
            await exchange.read()
            await exchange.finish()
        [waited, own] = sorted(traces.trace_of("mine"), key=lambda span: span.kind)
        assert (waited.name, waited.parent_id, own.kind) == ("held", own.span_id, "server")
        assert (own.trace_id, own.parent_id, own.state) == (TRACE_ID, PARENT_ID, "vendor=1")
        assert own.attributes["gen_ai.usage.output_tokens"] == 2
        assert sent_on["traceparent"] == f"00-{TRACE_ID}-{own.span_id}-01"
        assert sent_on["tracestate"] == "vendor=1"


async def test_what_is_not_recorded_here_is_not_recorded_by_frontends() -> None:
    with collector() as traces:
        none = TraceOptions(endpoint=traces.url, sampling=0.0)
        async with stub_frontend("a") as stub, picker_of(stub, traces=none) as (_, proxy):
            response = await proxy.exchange().ask(BODY, tracestate="vendor=1")
            common = response.request_headers.response
            assert set_headers(common)["traceparent"].endswith("-00")
            assert "tracestate" in common.header_mutation.remove_headers, "it belongs to no trace"


async def ends_in(exchange: Exchange) -> grpc.StatusCode:
    """Return the error in which a stream ends."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await exchange.read()
    return error.value.code()


async def is_invalid(exchange: Exchange, sent: list[Any]) -> None:
    for message in sent:
        await exchange.send(message)
    assert await ends_in(exchange) == grpc.StatusCode.INVALID_ARGUMENT
