"""The endpoint picker with Envoy, which asks it about each request and leads the request to the endpoint."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest

from minisgl.gateway.config import GatewayLimits
from support.gateway.envoy import envoy_of
from support.gateway.proxy import BODY, CHAT, DESTINATION, ELSEWHERE, at, gone, held, shows
from support.gateway.running import WAIT_SECONDS, RunningGateway, gateway_of, until
from support.gateway.stub_frontend import Received, StubFrontend, echo, stub_frontend

Stubs = tuple[StubFrontend, StubFrontend]
in_both_modes = pytest.mark.parametrize("buffered", [False, True], ids=["full-duplex", "buffered"])
EVENT = b'data: {"choices": []}\n\n'
USAGE = b': minisgl-usage {"prompt_tokens":7,"completion_tokens":1}\n\n'


@pytest.fixture
async def stubs() -> AsyncIterator[Stubs]:
    """Two frontends of the model `a`."""
    async with stub_frontend("a") as first, stub_frontend("a") as second:
        yield first, second


def port_of(gateway: RunningGateway) -> int:
    return gateway.server.endpoint_picker_port


class Streaming:
    """Handler that answers with one event at once, and with the rest when it `may_end`."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def __call__(self, request: Received) -> None:
        await request.begin_stream()
        await request.piece(EVENT)
        await self.may_end.wait()
        await request.piece(EVENT + USAGE)
        await request.end_stream()


async def drop(request: Received) -> None:
    request.drop()


@in_both_modes
@pytest.mark.parametrize("plaintext", [False, True], ids=["tls", "plaintext"])
async def test_requests_of_all_sizes_arrive_at_the_endpoints_that_were_picked(
    stubs: Stubs, buffered: bool, plaintext: bool
) -> None:
    picker = {"endpoint_picker_port": 0, "endpoint_picker_plaintext": plaintext}
    bodies = [BODY | {"x": "y" * size} for size in (1, 100_000, 1_000_000, 5_000_000)]
    async with (
        gateway_of(*stubs, **picker) as gateway,
        envoy_of(port_of(gateway), stubs, tls=not plaintext, buffered=buffered) as client,
    ):
        for body in bodies:
            response = await client.post(CHAT, json=body, headers={DESTINATION: ELSEWHERE})
            assert response.status_code == 200
            assert httpx.Response(200, text=response.json()["body"]).json() == body
    for stub in stubs:
        assert [request.headers[DESTINATION].split(",")[0] for request in stub.received] == [at(stub)] * 2


@in_both_modes
async def test_the_next_endpoint_serves_if_the_first_fails_and_is_counted(stubs: Stubs, buffered: bool) -> None:
    failing, serving = stubs
    async with (
        gateway_of(*stubs, endpoint_picker_port=0) as gateway,
        envoy_of(port_of(gateway), stubs, buffered=buffered) as client,
    ):
        failing.handler, serving.handler = drop, Streaming()
        # Each has its turn to be the first.
        async with client.stream("POST", CHAT, json=BODY) as one, client.stream("POST", CHAT, json=BODY) as other:
            assert one.status_code == other.status_code == 200
            failing.handler = echo
            for _ in range(4):
                assert (await client.post(CHAT, json=BODY)).json()["headers"][DESTINATION].startswith(at(failing))


@in_both_modes
async def test_one_endpoint_is_named_to_a_gateway_that_goes_where_the_header_says(stubs: Stubs, buffered: bool) -> None:
    async with (
        gateway_of(*stubs, endpoint_picker_port=0, endpoint_picker_single=True) as gateway,
        envoy_of(port_of(gateway), stubs, buffered=buffered, by_header=True) as client,
    ):
        for _ in range(4):
            assert (await client.post(CHAT, json=BODY)).status_code == 200
    for stub in stubs:
        assert [request.headers[DESTINATION] for request in stub.received] == [at(stub)] * 2


@in_both_modes
async def test_only_endpoints_of_the_subset_get_requests(stubs: Stubs, buffered: bool) -> None:
    async with gateway_of(*stubs, endpoint_picker_port=0) as gateway:
        for stub in stubs:
            async with envoy_of(port_of(gateway), stubs, buffered=buffered, subset=[at(stub)]) as client:
                before = len(stub.received)
                for _ in range(3):
                    assert (await client.post(CHAT, json=BODY)).status_code == 200
                assert len(stub.received) == before + 3
        async with envoy_of(port_of(gateway), stubs, buffered=buffered, subset=[]) as client:
            response = await client.post(CHAT, json=BODY)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
            assert response.headers["retry-after"]


@in_both_modes
async def test_what_the_picker_refuses_is_answered_in_its_words(buffered: bool) -> None:
    limits = GatewayLimits(waiting=1)
    async with (
        stub_frontend("a") as stub,
        gateway_of(stub, limits=limits, endpoint_picker_port=0) as gateway,
        envoy_of(port_of(gateway), [stub], buffered=buffered) as client,
    ):
        for body, status, code in (
            (b"{", 400, "invalid_json"),
            (b'{"model": "b"}', 404, "model_not_found"),
            (b'{"model": "a", "x": "%b"}' % (b"y" * 9_000_000), 413, "body_too_large"),
        ):
            response = await client.post(CHAT, content=body)
            assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        await gone(gateway, stub)
        waiting = asyncio.create_task(client.post(CHAT, json=BODY))
        await until(lambda: held(gateway))
        response = await client.post(CHAT, json=BODY)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
        assert response.headers["x-request-id"]
        await stub.start()
        assert (await waiting).status_code == 200


@in_both_modes
async def test_a_stream_passes_as_it_comes_without_the_report_of_usage(stubs: Stubs, buffered: bool) -> None:
    streaming = stubs[0].handler = stubs[1].handler = Streaming()
    async with (
        gateway_of(*stubs, endpoint_picker_port=0) as gateway,
        envoy_of(port_of(gateway), stubs, buffered=buffered) as client,
    ):
        async with client.stream("POST", CHAT, json=BODY) as response:
            pieces = response.aiter_raw()
            assert await anext(pieces) == EVENT
            streaming.may_end.set()
            assert b"".join([piece async for piece in pieces]) == EVENT
        used = 'minisgl:gateway_prompt_tokens_total{component="gateway",tenant="anyone",model="a"} 7'
        await until(lambda: shows(gateway, used))


async def test_trailers_pass_in_both_directions() -> None:
    """Without retries: for them, Envoy 1.40.0 keeps a body with trailers twice, and sends it twice."""

    async def with_trailers(request: Received) -> None:
        await request.begin_stream()
        await request.piece(EVENT)
        await request.send(b"0\r\nx-end: response\r\n\r\n")

    async with (
        stub_frontend("a", handler=with_trailers) as stub,
        gateway_of(stub, endpoint_picker_port=0) as gateway,
        envoy_of(port_of(gateway), [stub], by_header=True) as client,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head.encode() + b'd\r\n{"model": "a"\r\n1\r\n}\r\n0\r\nx-end: request\r\n\r\n')
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n0\r\nx-end: response\r\n\r\n"), WAIT_SECONDS)
        assert answer.startswith(b"HTTP/1.1 200") and EVENT in answer
        assert stub.received[0].json == {"model": "a"}
        writer.close()


@in_both_modes
async def test_a_client_that_leaves_is_noticed_by_its_frontend(buffered: bool) -> None:
    left = asyncio.Event()

    async def stream(request: Received) -> None:
        await request.begin_stream()
        await request.piece(EVENT)
        await request.client_left()
        left.set()

    async with (
        stub_frontend("a", handler=stream) as stub,
        gateway_of(stub, endpoint_picker_port=0) as gateway,
        envoy_of(port_of(gateway), [stub], buffered=buffered) as client,
    ):
        async with client.stream("POST", CHAT, json=BODY) as response:
            assert await anext(response.aiter_raw()) == EVENT
        await asyncio.wait_for(left.wait(), WAIT_SECONDS)
        await until(lambda: shows(gateway, 'minisgl:gateway_inflight{component="gateway"} 0'))


@pytest.mark.parametrize("opens", [False, True], ids=["fail-close", "fail-open"])
async def test_a_gateway_without_its_picker_refuses_requests_unless_it_is_set_to_pass_them(opens: bool) -> None:
    """Envoy passes only requests whose bodies it has kept. A response that was on its way to a picker is cut off."""
    streaming = Streaming()
    async with (
        stub_frontend("a", handler=streaming) as stub,
        ended_early(stub) as (gateway, end),
        envoy_of(port_of(gateway), [stub], buffered=opens, opens_on_failure=opens) as client,
    ):
        async with client.stream("POST", CHAT, json=BODY) as response:
            pieces = response.aiter_raw()
            assert await anext(pieces) == EVENT
            await end()
            if opens:
                streaming.may_end.set()
                assert b"".join([piece async for piece in pieces]) == EVENT + USAGE
            else:
                with pytest.raises(httpx.RemoteProtocolError):
                    await anext(pieces)
        stub.handler = echo
        assert (await client.post(CHAT, json=BODY)).status_code == (200 if opens else 500)


@contextlib.asynccontextmanager
async def ended_early(stub: StubFrontend) -> AsyncIterator[tuple[RunningGateway, Callable[[], Awaitable[None]]]]:
    """Run a gateway, and return it with a function that ends it."""
    async with contextlib.AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(gateway_of(stub, endpoint_picker_port=0, drain_timeout=0.0))
        yield gateway, stack.aclose
