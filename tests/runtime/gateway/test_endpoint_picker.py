"""The gateway as an endpoint picker: statements of the Endpoint Picker Protocol 1.0.0, and names of models."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import grpc.aio
import msgspec
import pytest
import uvloop

from minisgl.frontend.server.listeners import ServerError
from minisgl.gateway.backends import BackendError
from minisgl.gateway.config import MAX_BODY_BYTES, GatewayLimits, GatewayOptions
from minisgl.gateway.endpoint_picker.endpoints import EndpointSlice, of_slice, parse_endpoint
from minisgl.gateway.endpoint_picker.messages import SERVICE
from minisgl.gateway.endpoint_picker.picker import Picker
from minisgl.gateway.endpoint_picker.server import PickerServer
from minisgl.gateway.process import GatewayServer
from support.gateway.proxy import (
    BODY,
    BUFFERED,
    BUFFERED_PARTIAL,
    CHAT,
    DESTINATION,
    ELSEWHERE,
    NONE,
    NOT_SERVING,
    SERVING,
    STREAMED,
    Proxy,
    at,
    gone,
    held,
    picked,
    picker_of,
    refused,
    request_body,
    request_headers,
    request_trailers,
    response_body,
    response_headers,
    response_trailers,
    set_headers,
    shows,
)
from support.gateway.running import gateway_of, until
from support.gateway.stub_frontend import StubFrontend, stub_frontend


@pytest.fixture
async def stubs() -> AsyncIterator[tuple[StubFrontend, StubFrontend]]:
    """Two frontends of the model `a`."""
    async with stub_frontend("a") as first, stub_frontend("a") as second:
        yield first, second


# Endpoint subset


async def test_only_endpoints_of_the_subset_are_selected(stubs: tuple[StubFrontend, StubFrontend]) -> None:
    async with picker_of(*stubs) as (_, proxy):
        for stub in (*stubs, *stubs):
            assert await proxy.exchange().pick(BODY, subset=[ELSEWHERE, at(stub)]) == [at(stub)]


async def test_a_subset_without_an_eligible_endpoint_is_an_immediate_response_503(
    stubs: tuple[StubFrontend, StubFrontend],
) -> None:
    subsets: list[Any] = [[], [ELSEWHERE], ["", "no endpoint", "127.0.0.1:0", "[::1]:x"], "127.0.0.1:1"]
    async with picker_of(*stubs) as (_, proxy):
        for subset in subsets:
            assert refused(await proxy.exchange().ask(BODY, subset=subset)) == (503, "engine_unavailable")


async def test_without_a_subset_all_endpoints_of_the_model_are_selected_from(
    stubs: tuple[StubFrontend, StubFrontend],
) -> None:
    async with stub_frontend("b") as other, picker_of(*stubs, other) as (_, proxy):
        assert set(await proxy.exchange().pick(BODY)) == {at(stub) for stub in stubs}
        assert await proxy.exchange().pick({"model": "b"}) == [at(other)]


async def test_a_subset_may_come_with_the_body(stubs: tuple[StubFrontend, StubFrontend]) -> None:
    async with picker_of(*stubs) as (_, proxy):
        for stub in stubs:
            exchange = proxy.exchange()
            await exchange.send(request_headers())
            await exchange.send(request_body(json.dumps(BODY).encode(), end=True, subset=[at(stub)]))
            assert picked(await exchange.read()) == [at(stub)]


# Destination endpoint


async def test_header_and_metadata_have_the_same_endpoints_with_the_primary_first(
    stubs: tuple[StubFrontend, StubFrontend],
) -> None:
    """`picked` compares both. The frontend with the fewest requests in flight is the first of the list."""
    async with picker_of(*stubs) as (_, proxy):
        exchange = proxy.exchange()
        [busy, idle] = await exchange.pick(BODY)
        for _ in range(3):
            short = proxy.exchange()
            assert await short.pick(BODY) == [idle, busy]
            await short.finish()
        await exchange.finish()


async def test_a_request_may_be_tried_at_three_endpoints() -> None:
    async with (
        stub_frontend("a") as one,
        stub_frontend("a") as two,
        stub_frontend("a") as three,
        stub_frontend("a") as four,
        picker_of(one, two, three, four) as (_, proxy),
    ):
        endpoints = await proxy.exchange().pick(BODY)
        assert len(set(endpoints)) == 3
        assert set(endpoints) < {at(stub) for stub in (one, two, three, four)}


async def test_a_client_cannot_choose_its_endpoint(stubs: tuple[StubFrontend, StubFrontend]) -> None:
    async with picker_of(stubs[0]) as (_, proxy):
        response = await proxy.exchange().ask(BODY, **{DESTINATION.replace("-", "_"): ELSEWHERE})
        assert picked(response) == [at(stubs[0])]
        [header] = [
            each
            for each in response.request_headers.response.header_mutation.set_headers
            if each.header.key == DESTINATION
        ]
        assert header.append_action == 2, "the header of the client is overwritten"


async def test_the_body_returns_in_a_full_duplex_stream_after_the_endpoint(
    stubs: tuple[StubFrontend, StubFrontend],
) -> None:
    async with picker_of(*stubs) as (_, proxy):
        exchange = proxy.exchange()
        content = json.dumps(BODY | {"x": "y" * 200_000}).encode()
        await exchange.send(request_headers())
        for start in range(0, len(content), 50_000):
            await exchange.send(request_body(content[start : start + 50_000], end=start + 50_000 >= len(content)))
        assert len(picked(await exchange.read())) == 2
        assert await exchange.whole_body() == content
        await exchange.finish()


async def test_no_ready_endpoint_is_an_immediate_response_503() -> None:
    limits = GatewayLimits(queue_seconds=0.2)
    async with stub_frontend("a") as stub, picker_of(stub, limits=limits) as (gateway, proxy):
        await gone(gateway, stub)
        response = await proxy.exchange().ask(BODY)
        assert refused(response) == (503, "engine_unavailable")
        assert "retry-after" in {each.header.key for each in response.immediate_response.headers.set_headers}
        # Requests that no model is started for.
        assert refused(await proxy.exchange().ask(BODY, "/tokenize")) == (503, "engine_unavailable")


async def test_a_request_that_is_shed_is_an_immediate_response_429() -> None:
    limits = GatewayLimits(waiting=1)
    async with stub_frontend("a") as stub, picker_of(stub, limits=limits) as (gateway, proxy):
        await gone(gateway, stub)
        waiting = proxy.exchange()
        await waiting.send(request_headers())
        await waiting.send(request_body(json.dumps(BODY).encode(), end=True))
        await until(lambda: held(gateway))
        assert refused(await proxy.exchange().ask(BODY)) == (429, "queue_full")
        waiting.call.cancel()


# Destination endpoint served


async def test_the_endpoint_that_served_is_the_one_that_counts(stubs: tuple[StubFrontend, StubFrontend]) -> None:
    async with picker_of(*stubs) as (_, proxy):
        exchange = proxy.exchange()
        [primary, fallback] = await exchange.pick(BODY)
        await exchange.send(response_headers(served=fallback))
        assert (await exchange.read()).WhichOneof("response") == "response_headers"
        for _ in range(3):
            other = proxy.exchange()
            assert await other.pick(BODY) == [primary, fallback]
            await other.finish()
        await exchange.finish()
        firsts = set()
        for _ in range(2):
            other = proxy.exchange()
            firsts.add((await other.pick(BODY))[0])
            await other.finish()
        assert firsts == {primary, fallback}, "the count ends with its stream"


async def test_an_endpoint_that_served_may_be_named_late_or_not_at_all(
    stubs: tuple[StubFrontend, StubFrontend],
) -> None:
    async with picker_of(*stubs) as (_, proxy):
        exchange = proxy.exchange()
        [primary, fallback] = await exchange.pick(BODY)
        await exchange.send(response_headers(served="no endpoint"))
        await exchange.read()
        await exchange.send(response_body(b"{}", served=fallback))
        await exchange.read()
        for _ in range(2):
            other = proxy.exchange()
            assert await other.pick(BODY) == [primary, fallback]
            await other.finish()
        await exchange.finish()


# Health


async def test_liveness_readiness_and_the_service_are_health_services(
    stubs: tuple[StubFrontend, StubFrontend],
) -> None:
    async with picker_of(*stubs) as (_, proxy):
        for service in ("liveness", "readiness", SERVICE, ""):
            assert await proxy.health(service) == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await proxy.health("other")
        assert error.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_picker_that_has_not_listed_everything_is_alive_but_not_ready() -> None:
    server = PickerServer(cast(Picker, None), lambda: "the models have not been listed yet")
    await server.start("127.0.0.1", 0, plaintext=True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        for service, status in (("liveness", SERVING), ("readiness", NOT_SERVING), (SERVICE, NOT_SERVING)):
            assert await Proxy(channel).health(service) == status
    await server.stop(0)


async def test_streams_in_progress_finish_after_the_picker_was_stopped(
    stubs: tuple[StubFrontend, StubFrontend],
) -> None:
    async with picker_of(*stubs, drain_timeout=20.0) as (gateway, proxy):
        exchange = proxy.exchange()
        await exchange.pick(BODY)
        gateway.server.stop()

        async def is_closed() -> bool:
            try:
                await proxy.health("liveness")
            except grpc.aio.AioRpcError:
                return True
            return False

        await until(is_closed)
        await exchange.send(response_headers(end=True))
        assert (await exchange.read()).WhichOneof("response") == "response_headers"
        await exchange.finish()


# External processing


async def test_the_port_has_tls_with_a_self_signed_certificate_by_default(
    stubs: tuple[StubFrontend, StubFrontend],
) -> None:
    async with gateway_of(*stubs, endpoint_picker_port=0) as gateway:
        port = gateway.server.endpoint_picker_port
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        certificate = ssl.DER_cert_to_PEM_cert(writer.get_extra_info("ssl_object").getpeercert(True))
        writer.close()
        name = [("grpc.ssl_target_name_override", "minisgl-endpoint-picker")]
        credentials = grpc.ssl_channel_credentials(certificate.encode())
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=name) as channel:
            assert len(await Proxy(channel).exchange().pick(BODY)) == 2


async def test_pieces_of_a_response_pass_as_they_come(stubs: tuple[StubFrontend, StubFrontend]) -> None:
    async with picker_of(*stubs) as (gateway, proxy):
        exchange = proxy.exchange()
        await exchange.pick(BODY)
        await exchange.send(response_headers(content_type="text/event-stream"))
        assert (await exchange.read()).WhichOneof("response") == "response_headers"
        report = b': minisgl-usage {"prompt_tokens":20,"completion_tokens":40}\n\n'
        for piece, passed, end in (
            (b'data: {"a": 1}\n\n', b'data: {"a": 1}\n\n', False),
            (report, b"", False),
            (b"data: [DONE]\n\n", b"data: [DONE]\n\n", True),
        ):
            await exchange.send(response_body(piece, end=end))
            streamed = (await exchange.read()).response_body.response.body_mutation.streamed_response
            assert (streamed.body, streamed.end_of_stream) == (passed, end)
        await exchange.send(response_trailers())
        assert (await exchange.read()).WhichOneof("response") == "response_trailers"
        await exchange.finish()
        labels = 'component="gateway",tenant="anyone",model="a"'
        await until(lambda: shows(gateway, f"gateway_completion_tokens_total{{{labels}}} 40\n"))


async def test_trailers_end_a_response_with_what_was_kept_of_it(stubs: tuple[StubFrontend, StubFrontend]) -> None:
    async with picker_of(*stubs) as (_, proxy):
        exchange = proxy.exchange()
        await exchange.pick(BODY)
        await exchange.send(response_headers(content_type="text/event-stream"))
        await exchange.read()
        # What may become a report of used tokens waits for its end.
        await exchange.send(response_body(b"data: 1\n\n: mini"))
        streamed = (await exchange.read()).response_body.response.body_mutation.streamed_response
        assert streamed.body == b"data: 1\n\n"
        await exchange.send(response_trailers())
        streamed = (await exchange.read()).response_body.response.body_mutation.streamed_response
        assert (streamed.body, streamed.end_of_stream) == (b": mini", False)
        assert (await exchange.read()).WhichOneof("response") == "response_trailers"
        await exchange.finish()


async def test_trailers_may_end_a_body(stubs: tuple[StubFrontend, StubFrontend]) -> None:
    async with picker_of(*stubs) as (_, proxy):
        exchange = proxy.exchange()
        await exchange.send(request_headers())
        await exchange.send(request_body(json.dumps(BODY).encode(), end=False))
        await exchange.send(request_trailers())
        assert len(picked(await exchange.read())) == 2
        streamed = (await exchange.read()).request_body.response.body_mutation.streamed_response
        assert (json.loads(streamed.body), streamed.end_of_stream) == (BODY, False)
        assert (await exchange.read()).WhichOneof("response") == "request_trailers"
        await exchange.finish()


async def test_a_buffered_body_gets_its_endpoint_after_it(stubs: tuple[StubFrontend, StubFrontend]) -> None:
    async with picker_of(*stubs) as (_, proxy):
        exchange = proxy.exchange()
        await exchange.send(request_headers(mode=BUFFERED, response_mode=BUFFERED))
        first = await exchange.read()
        assert first.WhichOneof("response") == "request_headers"
        assert not first.request_headers.response.header_mutation.set_headers
        await exchange.send(request_body(json.dumps(BODY).encode(), end=True))
        response = await exchange.read()
        assert len(picked(response)) == 2
        assert not response.request_body.response.HasField("body_mutation")
        assert "x-minisgl-report-usage" not in set_headers(response.request_body.response)
        await exchange.send(response_headers())
        await exchange.read()
        await exchange.send(response_body(b"{}", end=True))
        assert not (await exchange.read()).response_body.HasField("response")
        await exchange.finish()


async def test_a_buffered_body_may_be_followed_by_trailers(stubs: tuple[StubFrontend, StubFrontend]) -> None:
    """Then the proxy does not say that the body ends."""
    async with picker_of(*stubs) as (_, proxy):
        exchange = proxy.exchange()
        await exchange.send(request_headers(mode=BUFFERED))
        await exchange.read()
        await exchange.send(request_body(json.dumps(BODY).encode(), end=False))
        assert len(picked(await exchange.read())) == 2
        await exchange.send(request_trailers())
        assert (await exchange.read()).WhichOneof("response") == "request_trailers"
        await exchange.finish()


@pytest.mark.parametrize("mode", [STREAMED, BUFFERED_PARTIAL])
async def test_bodies_that_leave_before_the_pick_are_refused(
    stubs: tuple[StubFrontend, StubFrontend], mode: int
) -> None:
    async with picker_of(*stubs) as (_, proxy):
        exchange = proxy.exchange()
        await exchange.send(request_headers(mode=mode))
        response = await exchange.read()
        assert refused(response) == (500, "internal_error")
        assert b"FULL_DUPLEX_STREAMED" in response.immediate_response.body


async def test_a_header_names_the_model_of_a_body_that_does_not_pass_here(
    stubs: tuple[StubFrontend, StubFrontend],
) -> None:
    async with stub_frontend("b") as other, picker_of(*stubs, other) as (_, proxy):
        exchange = proxy.exchange()
        await exchange.send(request_headers(mode=NONE, response_mode=NONE, x_gateway_model_name="b"))
        assert picked(await exchange.read()) == [at(other)]
        await exchange.send(response_headers())
        assert (await exchange.read()).WhichOneof("response") == "response_headers"
        await exchange.finish()
        unnamed = proxy.exchange()
        await unnamed.send(request_headers(mode=NONE))
        assert refused(await unnamed.read()) == (400, "missing_required_parameter")


async def test_a_proxy_that_only_observes_gets_no_answers(stubs: tuple[StubFrontend, StubFrontend]) -> None:
    async with picker_of(*stubs) as (_, proxy):
        exchange = proxy.exchange()
        message = request_headers()
        message.observability_mode = True
        await exchange.send(message)
        assert await exchange.read() is None


# Names of models


async def test_body_and_headers_name_the_model() -> None:
    async with stub_frontend("a") as a, stub_frontend("b") as b, picker_of(a, b) as (_, proxy):
        for path, model, headers in (
            (CHAT, "a", {}),
            (CHAT, None, {"x_gateway_model_name": "a"}),
            (CHAT, None, {"x_gateway_base_model_name": "a"}),
            ("/v1/messages?beta=true", "a", {"x_gateway_model_name": "b"}),
        ):
            body = {} if model is None else {"model": model}
            assert await proxy.exchange().pick(body, path, **headers) == [at(a)]


async def test_a_request_without_a_body_goes_to_the_model_of_its_header(
    stubs: tuple[StubFrontend, StubFrontend],
) -> None:
    async with picker_of(*stubs) as (_, proxy):
        exchange = proxy.exchange()
        await exchange.send(request_headers("/v1/models", method="GET", end=True, x_gateway_model_name="a"))
        assert len(picked(await exchange.read())) == 2
        await exchange.finish()


async def test_an_invalid_request_ends_in_an_error_of_its_api(stubs: tuple[StubFrontend, StubFrontend]) -> None:
    cases: list[tuple[Any, str, dict[str, str], tuple[int, str]]] = [
        ({"model": "x"}, CHAT, {}, (404, "model_not_found")),
        (BODY, "/metrics", {}, (404, "not_found")),
        (BODY, "/unknown", {}, (404, "not_found")),
        (b"{", CHAT, {}, (400, "invalid_json")),
        (b"\xff", CHAT, {}, (400, "invalid_json")),
        ({"model": 1}, CHAT, {}, (400, "invalid_value")),
        (BODY, CHAT, {"content_type": "text/html"}, (415, "unsupported_media_type")),
        (BODY, CHAT, {"content_encoding": "gzip"}, (415, "unsupported_media_type")),
        (b"x", CHAT, {"content_length": str(MAX_BODY_BYTES + 1)}, (413, "body_too_large")),
    ]
    async with picker_of(*stubs) as (gateway, proxy):
        for body, path, headers, error in cases:
            assert refused(await proxy.exchange().ask(body, path, **headers)) == error
        response = await proxy.exchange().ask({"model": "x"}, "/v1/messages")
        assert json.loads(response.immediate_response.body)["type"] == "error", "as Anthropic's API has it"
        assert not (await gateway.control("/gateway/status"))["models"], "no model is woken"


async def test_a_request_that_generates_nothing_wakes_no_model(stubs: tuple[StubFrontend, StubFrontend]) -> None:
    async with picker_of(*stubs) as (gateway, proxy):
        empty, scan = proxy.exchange(), proxy.exchange()
        await empty.send(request_headers(end=True, x_gateway_model_name="a"))
        assert refused(await empty.read()) == (400, "invalid_json")
        # Frontends say that the path has another method.
        await scan.send(request_headers(method="GET", end=True, x_gateway_model_name="a"))
        assert len(picked(await scan.read())) == 2
        assert not (await gateway.control("/gateway/status"))["models"]


async def test_a_body_that_is_too_large_is_refused_while_it_comes(stubs: tuple[StubFrontend, StubFrontend]) -> None:
    async with picker_of(*stubs) as (_, proxy):
        exchange = proxy.exchange()
        await exchange.send(request_headers())
        for _ in range(3):
            await exchange.send(request_body(b" " * (3 << 20), end=False))
        assert refused(await exchange.read()) == (413, "body_too_large")


# Endpoints


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("10.0.0.1:8000", "10.0.0.1:8000"),
        (" [fd00:0:0::1]:8000 ", "[fd00::1]:8000"),
        ("fd00::1:8000", "[fd00::1]:8000"),
        ("10.0.0.1", None),
        ("10.0.0.1:", None),
        ("10.0.0.1:65536", None),
        ("10.0.0.1:80000000000000000000", None),
        ("10.0.0.1:\u0661", None),
        ("name:80", None),
        ("", None),
    ],
)
def test_an_endpoint_is_an_address_and_a_port(text: str, found: str | None) -> None:
    assert parse_endpoint(text) == found


def test_ready_endpoints_of_a_slice_have_the_port_of_http() -> None:
    found: dict[str, Any] = {
        "metadata": {"name": "x"},
        "endpoints": [
            {"addresses": ["fd00::1"], "conditions": {}},
            {"addresses": ["fd00::2"], "conditions": {"ready": False}},
            {"addresses": ["fd00::3"], "conditions": {"ready": True}},
        ],
        "ports": [{"name": "control", "port": 8001}, {"name": "http", "port": 8000}],
    }
    assert of_slice(msgspec.convert(found, EndpointSlice)) == ["[fd00::1]:8000", "[fd00::3]:8000"]
    for empty in ({"endpoints": None}, {"ports": None}, {"ports": [{"name": "http", "port": None}]}):
        assert of_slice(msgspec.convert(found | empty, EndpointSlice)) == []


# Start


def test_it_serves_in_the_loop_of_the_process() -> None:
    """That of uvloop, which tests in a loop of their own do not use."""

    async def serve() -> None:
        async with stub_frontend("a") as stub, picker_of(stub) as (_, proxy):
            assert await proxy.exchange().pick(BODY) == [at(stub)]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


def test_a_server_with_a_name_is_no_endpoint() -> None:
    options = GatewayOptions(port=0, control_port=0, endpoint_picker_port=0, backends=("http://localhost:1",))
    with pytest.raises(BackendError, match="needs an IP address"):
        GatewayServer(options)


async def test_a_port_that_is_taken_is_an_error(stubs: tuple[StubFrontend, StubFrontend]) -> None:
    backends = (stubs[0].url,)
    options = GatewayOptions(port=0, control_port=0, endpoint_picker_port=stubs[1].port, backends=backends)
    with pytest.raises(ServerError, match="choose another --endpoint-picker-port"):
        await GatewayServer(options).serve()
