"""Requests on their way to frontends, and responses on their way back."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from starlette.types import Message

from minisgl.frontend.config import RequestLimits
from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.request_record import RequestRecord
from minisgl.frontend.server.request_tracker import RequestTracker
from minisgl.gateway import forwarding
from minisgl.gateway.config import GatewayLimits
from minisgl.gateway.early_errors import counted_code
from minisgl.gateway.forwarding import Forwarding, Outgoing
from minisgl.gateway.holding import Holding
from minisgl.gateway.models import Address, Key, Model
from minisgl.gateway.upstream import Client, UpstreamError
from support.gateway.running import Answer, RunningGateway, gateway_of, parsed, until
from support.gateway.stub_frontend import Received, StubFrontend, echo, stub_frontend

CHAT = "/v1/chat/completions"
POST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 13\r\n\r\n"
    b'{"model":"a"}'
)

STREAM = POST.replace(b"13", b"29").replace(b'"a"', b'"a", "stream": true')


def chat(model: str = "a", **fields: object) -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": "Hi"}], **fields}


async def test_a_request_goes_to_the_frontend_of_its_model() -> None:
    async with stub_frontend("a") as a, stub_frontend("b", "b-alias") as b, gateway_of(a, b) as gateway:
        for name, stub in (("a", a), ("b", b), ("b-alias", b)):
            answer = await gateway.post(CHAT + "?x=1", chat(name))
            assert answer.status == 200
            assert answer.json["path"] == CHAT + "?x=1"
            assert stub.received[-1].json == chat(name)


async def test_a_stream_passes_byte_for_byte() -> None:
    pieces = [
        b'data: {"a": 1}\n\n',
        b"da",
        b"ta: x\n",
        b"\n: ping\n\n",
        b"\xff\x00\r\n",
        b": mini",
        b"data: [DONE]\n\n",
    ]

    async def stream(request: Received) -> None:
        await request.begin_stream()
        for piece in pieces:
            await request.piece(piece)
            await asyncio.sleep(0.005)
        await request.end_stream()

    async with stub_frontend("a", handler=stream) as stub, gateway_of(stub) as gateway:
        answer = await gateway.post(CHAT, chat(stream=True))
        assert answer.body == b"".join(pieces)
        assert answer.headers["content-type"] == "text/event-stream"


async def test_the_report_of_used_tokens_is_asked_for_and_taken_out() -> None:
    async def stream(request: Received) -> None:
        assert request.headers["x-minisgl-report-usage"]
        await request.begin_stream('x-minisgl-usage: {"prompt_tokens":3,"completion_tokens":0}\r\n')
        await request.piece(b"data: 1\n\n")
        await request.piece(b': minisgl-usage {"prompt_tokens":3,"completion_tokens":9}\n\ndata: [DONE]\n\n')
        await request.end_stream()

    async with stub_frontend("a", handler=stream) as stub, gateway_of(stub) as gateway:
        answer = await gateway.post(CHAT, chat(stream=True))
        assert answer.body == b"data: 1\n\ndata: [DONE]\n\n"
        assert "x-minisgl-usage" not in answer.headers
        page = await gateway.metrics()
        assert 'gateway_prompt_tokens_total{component="gateway",tenant="anyone",model="a"} 3' in page
        assert 'gateway_completion_tokens_total{component="gateway",tenant="anyone",model="a"} 9' in page


async def test_a_request_is_held_while_no_frontend_answers() -> None:
    async with stub_frontend("a") as stub, gateway_of(stub) as gateway:
        await stub.stop()
        waiting = asyncio.create_task(gateway.post(CHAT, chat()))

        async def is_held() -> bool:
            demand = await gateway.demand("a")
            return demand is not None and demand["held"] == 1

        await until(is_held)
        await stub.start()
        assert (await waiting).status == 200
        assert (await gateway.demand("a"))["held"] == 0


async def test_the_frontends_of_an_idle_model_refuse_what_is_not_valid() -> None:
    async with stub_frontend("a") as stub:
        stub.handler = lambda request: request.answer(400, {"error": {"message": "no", "code": "invalid_value"}})
        client = Client(1.0)
        model = Model(key=Key("t", "a"), names=("a",), state="idle", addresses=(Address("127.0.0.1", stub.port),))
        holding = Holding(client, lambda key: model, RequestTracker(RequestLimits()).admission, 1000)
        holding.refuse(ApiError(503, "shutting_down", "nothing is held"))
        record, sent = RequestRecord(request_id="1", method="POST", path=CHAT, started_at=0.0), list[Message]()

        async def send(message: Message) -> None:
            sent.append(message)

        outgoing = Outgoing("POST", CHAT, b"", [], b"{}")
        forwarding_one = Forwarding(client, holding, record, model, 0, outgoing, dict)
        later = asyncio.get_running_loop().time() + 10
        await forwarding_one.answer(send, holds_until=later, until=later)
        assert sent[0]["status"] == 400
        client.close()


@pytest.mark.parametrize("host", ["a" * 64 + ".svc", "a..svc"])
async def test_a_host_name_that_the_resolver_refuses_cannot_be_reached(host: str) -> None:
    with pytest.raises(UpstreamError, match="not valid"):
        await Client(5.0).connect(Address(host, 1))


async def test_a_held_request_ends_with_the_queue_timeout() -> None:
    limits = GatewayLimits(queue_seconds=0.2)
    async with stub_frontend("a") as stub, gateway_of(stub, limits=limits) as gateway:
        await stub.stop()
        answer = await gateway.post(CHAT, chat())
        assert (answer.status, answer.code) == (503, "engine_unavailable")
        assert answer.headers["retry-after"]


async def test_a_frontend_that_dies_before_the_first_byte_is_replaced_by_another() -> None:
    async def die(request: Received) -> None:
        request.drop()

    async with stub_frontend("a", handler=die) as bad, stub_frontend("a") as good, gateway_of(bad, good) as gateway:
        for _ in range(4):
            assert (await gateway.post(CHAT, chat())).status == 200
        assert bad.received
        assert len(good.received) == 4


async def test_a_request_that_frontends_die_of_is_not_sent_for_ever() -> None:
    async def die(request: Received) -> None:
        request.drop()

    async with stub_frontend("a", handler=die) as stub, gateway_of(stub) as gateway:
        answer = await gateway.post(CHAT, chat())
        assert (answer.status, answer.code) == (502, "frontend_lost")
        assert len(stub.received) == 3


async def refuse(request: Received) -> None:
    """What a frontend does at the end of its time to leave, while older connections are still open."""
    await request.answer(503, {"error": {"message": "the server is shutting down", "code": "shutting_down"}})


async def test_a_request_that_a_leaving_frontend_refuses_goes_to_another() -> None:
    async with stub_frontend("a", handler=refuse) as bad, stub_frontend("a") as good, gateway_of(bad, good) as gateway:
        for _ in range(4):
            assert (await gateway.post(CHAT, chat())).status == 200
        assert bad.received
        assert len(good.received) == 4


async def test_a_request_that_the_only_frontend_refuses_waits_for_its_successor() -> None:
    async with stub_frontend("a", handler=refuse) as stub, gateway_of(stub) as gateway:

        async def refuse_last(request: Received) -> None:
            await refuse(request)
            stub.handler = echo

        stub.handler = refuse_last
        assert (await gateway.post(CHAT, chat())).status == 200
        assert len(stub.received) == 2


async def test_refusals_are_passed_on_in_the_end_as_other_errors_are_at_once() -> None:
    async with stub_frontend("a", handler=refuse) as stub, gateway_of(stub) as gateway:
        answer = await gateway.post(CHAT, chat())
        assert (answer.status, answer.code) == (503, "shutting_down")
        assert len(stub.received) == 3
        stub.handler = lambda request: request.answer(503, {"error": {"message": "no", "code": "not_serving"}})
        answer = await gateway.post(CHAT, chat())
        assert (answer.status, answer.code) == (503, "not_serving")
        assert answer.json == {"error": {"message": "no", "code": "not_serving"}}
        stub.handler = lambda request: request.answer(503, b"x" * 300_000)
        assert (await gateway.post(CHAT, chat())).body == b"x" * 300_000
        assert len(stub.received) == 5


@pytest.mark.parametrize(
    "beginning", [b"HTTP/1.1 200 OK\r\ncontent-le", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nab"]
)
async def test_a_request_is_not_sent_again_after_the_first_byte(beginning: bytes) -> None:
    async def die(request: Received) -> None:
        await request.send(beginning)
        await asyncio.sleep(0.02)
        request.drop()

    async with stub_frontend("a", handler=die) as stub, gateway_of(stub) as gateway:
        raw = await gateway.raw(POST)
        assert len(stub.received) == 1
        if b"502" in raw.splitlines()[0]:
            assert parsed(raw).code == "frontend_lost"
        else:
            assert raw.endswith(b"\r\n\r\nab"), "the body stays incomplete"


async def test_a_stream_that_breaks_off_has_no_end() -> None:
    async def die(request: Received) -> None:
        await request.begin_stream()
        await request.piece(b"data: 1\n\n")
        request.drop()

    async with stub_frontend("a", handler=die) as stub, gateway_of(stub) as gateway:
        raw = await gateway.raw(POST)
        assert raw.endswith(b"9\r\ndata: 1\n\n\r\n")


async def test_a_client_that_leaves_ends_the_request_at_the_frontend() -> None:
    left = asyncio.Event()

    async def stream(request: Received) -> None:
        await request.begin_stream()
        await request.piece(b"data: 1\n\n")
        await request.client_left()
        left.set()

    async with stub_frontend("a", handler=stream) as stub, gateway_of(stub) as gateway:
        reader, writer = await gateway.connect()
        writer.write(POST)
        await reader.readuntil(b"data: 1\n\n")
        writer.transport.abort()
        await asyncio.wait_for(left.wait(), 10)
        await until(lambda: _is_idle(gateway))


async def _is_idle(gateway: RunningGateway) -> bool:
    return bool((await gateway.demand("a"))["idle_seconds"] > 0)


async def test_a_client_that_reads_slowly_gets_everything() -> None:
    pieces = [b"data: %d %s\n\n" % (i, b"x" * 20_000) for i in range(300)]

    async def stream(request: Received) -> None:
        await request.begin_stream()
        for piece in pieces:
            await request.piece(piece)
        await request.end_stream()

    async with stub_frontend("a", handler=stream) as stub, gateway_of(stub) as gateway:
        reader, writer = await gateway.connect()
        writer.write(POST)
        raw = b""
        while part := await reader.read(50_000):
            raw += part
            await asyncio.sleep(0.001)
        assert parsed(raw).body == b"".join(pieces)
        writer.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that wait get their headers at once."""
    monkeypatch.setattr(forwarding, "_HEADER_SECONDS", 0.0)
    monkeypatch.setattr(forwarding, "_PING_SECONDS", 0.02)


@pytest.mark.usefixtures("impatient")
async def test_a_stream_that_waits_gets_headers_and_comments() -> None:
    async def stream(request: Received) -> None:
        await request.begin_stream()
        await request.piece(b"data: 1\n\n")
        await request.end_stream()

    async with stub_frontend("a", handler=stream) as stub, gateway_of(stub) as gateway:
        await stub.stop()
        reader, writer = await gateway.connect()
        writer.write(STREAM)
        assert b"text/event-stream" in await reader.readuntil(b"\r\n\r\n")
        for _ in range(3):
            await reader.readuntil(b":")
        assert (await gateway.demand("a"))["held"] == 1, "it keeps its place"
        await stub.start()
        assert (await reader.read()).endswith(b"9\r\ndata: 1\n\n\r\n0\r\n\r\n")
        writer.close()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("path", "event"),
    [(CHAT, b'data: {"error":'), ("/v1/messages", b"event: error\n"), ("/v1/responses", b"event: error\n")],
)
async def test_an_error_after_the_headers_of_a_stream_is_an_event(path: str, event: bytes) -> None:
    async with stub_frontend("a") as stub, gateway_of(stub) as gateway:
        stub.handler = lambda request: request.answer(400, {"error": {"message": "no", "code": "invalid_value"}})
        await stub.stop()
        reader, writer = await gateway.connect()
        writer.write(
            POST.replace(CHAT.encode(), path.encode()).replace(b"13", b"29").replace(b'"a"', b'"a", "stream": true')
        )
        await reader.readuntil(b"\r\n\r\n")
        await stub.start()
        rest = await reader.read()
        assert event in rest
        assert b"invalid_value" in rest
        assert not rest.endswith(b"0\r\n\r\n"), "the stream is not complete"
        writer.close()


@pytest.mark.usefixtures("impatient")
async def test_codes_that_a_server_invents_are_counted_together() -> None:
    async with stub_frontend("a") as stub, gateway_of(stub) as gateway:
        stub.handler = lambda request: request.answer(400, {"error": {"message": "no", "code": "invented-7"}})
        await stub.stop()
        reader, writer = await gateway.connect()
        writer.write(STREAM)
        await reader.readuntil(b"\r\n\r\n")
        await stub.start()
        assert b"invented-7" in await reader.read(), "the client gets it"
        writer.close()
        page = await gateway.metrics()
        assert 'code="bad_response"' in page
        assert "invented-7" not in page


def test_all_codes_of_the_documentation_are_counted_as_they_are() -> None:
    text = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    codes = re.findall(r"^\| \d{3} \| `(\w+)` \|", text, re.MULTILINE)
    assert len(codes) > 50
    assert [counted_code(code) for code in codes] == codes


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/score", "/classify", "/v1/chat/completions/batch"])
async def test_what_is_never_a_stream_is_not_begun_as_one(path: str) -> None:
    async with stub_frontend("a") as stub, gateway_of(stub) as gateway:
        await stub.stop()
        waiting = asyncio.create_task(gateway.post(path, {"model": "a", "stream": True}))

        async def is_held() -> bool:
            return ((await gateway.demand("a")) or {}).get("held") == 1

        await until(is_held)
        await asyncio.sleep(0.1)
        await stub.start()
        answer = await waiting
        assert (answer.status, answer.json["path"]) == (200, path)


async def test_a_response_that_takes_too_long_breaks_off() -> None:
    async def stream(request: Received) -> None:
        await request.begin_stream()
        await request.piece(b"data: 1\n\n")
        await request.client_left()

    limits = GatewayLimits(request_seconds=0.3)
    async with stub_frontend("a", handler=stream) as stub, gateway_of(stub, limits=limits) as gateway:
        assert (await gateway.raw(POST)).endswith(b"9\r\ndata: 1\n\n\r\n")
        stub.handler = lambda request: request.client_left()
        assert parsed(await gateway.raw(POST)).code == "deadline_exceeded"


@contextlib.asynccontextmanager
async def held_by_a_stopping_gateway(drain_timeout: float) -> AsyncIterator[tuple[StubFrontend, asyncio.Task[Answer]]]:
    """The frontend, which is not there, and the request that waits for it."""
    async with stub_frontend("a") as stub, gateway_of(stub, drain_timeout=drain_timeout) as gateway:
        await stub.stop()
        waiting = asyncio.create_task(gateway.post(CHAT, chat()))

        async def is_held() -> bool:
            return ((await gateway.demand("a")) or {}).get("held") == 1

        await until(is_held)
        gateway.server.stop()

        async def refuses_connections() -> bool:
            with contextlib.suppress(OSError):
                _, writer = await gateway.connect()
                writer.close()
                return False
            return True

        await until(refuses_connections)
        yield stub, waiting


async def test_requests_that_wait_are_answered_while_the_gateway_stops() -> None:
    async with held_by_a_stopping_gateway(60) as (stub, waiting):
        await stub.start()
        assert (await waiting).status == 200


async def test_requests_that_wait_end_with_the_drain_timeout() -> None:
    async with held_by_a_stopping_gateway(0.1) as (_, waiting):
        answer = await waiting
        assert (answer.status, answer.code) == (503, "shutting_down")


async def test_both_ports_tell_that_the_gateway_shuts_down() -> None:
    async with stub_frontend("a") as stub, gateway_of(stub) as gateway:
        assert (await gateway.get("/ready")).status == 200
        # As in a cluster, where it listens for a while.
        gateway.server._stopping = True
        answer = await gateway.get("/ready")
        assert (answer.status, answer.code) == (503, "not_ready")
        assert "shutting down" in answer.body.decode()
        assert not await gateway.is_ready()
        gateway.server._stopping = False


async def test_the_path_that_names_a_model_ends_at_the_gateway() -> None:
    async with stub_frontend("x/a") as stub, gateway_of(stub) as gateway:
        assert (await gateway.post(f"/x/b{CHAT}", chat())).code == "model_not_found"
        assert not stub.received
