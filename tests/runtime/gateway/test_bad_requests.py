"""Requests that are not forwarded: they wake no model, and end in the error of the API that they were sent to."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from minisgl.gateway.config import GatewayLimits
from support.gateway.running import RunningGateway, gateway_of, parsed
from support.gateway.stub_frontend import Handler, Received, StubFrontend, stub_frontend

CHAT = "/v1/chat/completions"


class _At(StubFrontend):
    """A server that runs elsewhere."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.port = port


def _to(port: int) -> Handler:
    """Return a handler that passes requests on to a port of this machine."""

    async def pass_on(request: Received) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        headers = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        writer.write(f"{request.method} {request.path} HTTP/1.1\r\n{headers}connection: close\r\n\r\n".encode())
        writer.write(request.body)
        answer = parsed(await reader.read())
        writer.close()
        await request.answer(answer.status, answer.body)

    return pass_on


KEYS = "tenants:\n- {name: t, keys: [sk-1], models: [a]}\n"


@pytest.mark.parametrize(
    ("path", "error"),
    [
        (CHAT, {"error": {"type": "not_found_error", "code": "model_not_found", "param": "model"}}),
        ("/v1/responses", {"error": {"type": "not_found_error", "code": "model_not_found"}}),
        ("/v1/messages", {"type": "error", "error": {"type": "not_found_error", "code": "model_not_found"}}),
        ("/v1/messages/count_tokens", {"type": "error", "error": {"type": "not_found_error"}}),
        ("/v2/rerank", {"message": "model 'x' does not exist; GET /v1/models lists all models"}),
        ("/embed", {"error": "model 'x' does not exist; GET /v1/models lists all models", "error_type": "Validation"}),
        ("/team/name/v1/messages", {"type": "error", "error": {"type": "not_found_error"}}),
    ],
)
async def test_an_unknown_model_is_an_error_of_the_api_that_was_asked(path: str, error: dict[str, object]) -> None:
    async with stub_frontend("a") as stub, gateway_of(stub) as gateway:
        answer = await gateway.post(path, {"model": "x"})
        assert answer.status == 404
        for name, value in error.items():
            found = answer.json[name]
            assert value.items() <= found.items() if isinstance(value, dict) else found == value
        assert not stub.received


async def test_nothing_invalid_wakes_a_model(tmp_path: Path) -> None:
    """10,000 requests with names, keys and bodies that are not valid, over a few connections."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(KEYS)
    rng = random.Random(7)
    async with stub_frontend("a", "b") as stub, gateway_of(stub, keys=str(keys)) as gateway:
        await stub.stop()
        requests = [_invalid(rng) for _ in range(10_000)]
        counts = await asyncio.gather(*(_send_all(gateway, requests[i::8]) for i in range(8)))
        statuses = {status for each in counts for status in each}
        assert sum(len(each) for each in counts) == len(requests)
        assert statuses <= {400, 401, 403, 404, 405, 413, 415}, statuses
        assert (await gateway.control("/gateway/status")) == {"models": {}}
        assert not stub.received


def _invalid(rng: random.Random) -> bytes:
    valid_key, body = b"authorization: Bearer sk-1\r\n", b'{"model":"a","messages":[]}'
    match rng.randrange(6):
        case 0:
            return _post(_name(rng), valid_key)
        case 1:
            return _post(body, b"authorization: Bearer sk-%d\r\n" % rng.randrange(2, 10**9))
        case 2:
            return _post(body, b"")
        case 3:
            return _post(body[: rng.randrange(len(body))], valid_key)
        case 4:
            return _post(rng.choice([b"[]", b"1", b'"a"', b"null", b'{"model":1}', b"\xff", b"[" * 9999]), valid_key)
        case _:
            return _post(body, valid_key + b"content-type: text/html\r\n")


def _name(rng: random.Random) -> bytes:
    name = "".join(rng.choice("ab/.A \u00e9\0") for _ in range(rng.randrange(2, 12)))
    return json.dumps({"model": f"x{name}"}).encode()


def _post(body: bytes, headers: bytes) -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: localhost\r\n%bcontent-length: %d\r\n\r\n%b" % (
        CHAT.encode(),
        headers,
        len(body),
        body,
    )


async def _send_all(gateway: RunningGateway, requests: Sequence[bytes]) -> list[int]:
    statuses = []
    reader, writer = await gateway.connect()
    for request in requests:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        statuses.append(int(head.split()[1]))
        if b"connection: close" in head:
            writer.close()
            reader, writer = await gateway.connect()
    writer.close()
    return statuses


async def test_two_headers_host_are_refused_whatever_they_name() -> None:
    async with stub_frontend("a") as stub, gateway_of(stub) as gateway:
        for hosts in (b"host: localhost\r\nhost: a.b\r\n", b"Host: a\r\nx: y\r\nHOST: a\r\n"):
            answer = parsed(await gateway.raw(b"GET /v1/models HTTP/1.1\r\n" + hosts + b"\r\n"))
            assert (answer.status, answer.code) == (400, "invalid_http")
            assert "several headers Host" in answer.json["error"]["message"]


async def test_gateways_that_lead_to_each_other_end_a_request() -> None:
    async with stub_frontend("a") as stub, gateway_of(stub) as first:
        # The second gateway is behind the first one, and takes the place of its only frontend then.
        port = stub.port
        async with gateway_of(_At(first.server.port)) as second:
            await stub.stop()
            circle = StubFrontend("a", handler=_to(second.server.port))
            circle.port = port
            await circle.start()
            try:
                answer = await first.post(CHAT, {"model": "a"})
            finally:
                await circle.stop()
            assert (answer.status, answer.code) == (508, "loop_detected")
            hops = [request.headers["x-minisgl-hops"] for request in circle.received]
            assert hops == ["1", "3"]


@pytest.mark.parametrize(
    ("given", "status"),
    [("3", 200), ("4", 508), ("999", 508), ("1\r\nx-minisgl-hops: 4", 508), ("9999", 200), ("-5", 200)],
)
async def test_hops_are_counted_up_to_four(given: str, status: int) -> None:
    async with stub_frontend("a") as stub, gateway_of(stub) as gateway:
        answer = await gateway.post(CHAT, {"model": "a"}, f"x-minisgl-hops: {given}\r\n")
        assert answer.status == status
        assert (await gateway.demand("a") is None) == (status == 508), "a refused request does not use the model"


BODY = b'{"model":"a"}'


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"transfer-encoding: chunked\r\ncontent-length: 13\r\n\r\nd\r\n" + BODY + b"\r\n0\r\n\r\n",
        b"content-length: 13\r\ncontent-length: 5\r\n\r\n" + BODY,
        b"content-length: +13\r\n\r\n" + BODY,
        b"content-length: 13, 13\r\n\r\n" + BODY,
        b"transfer-encoding: chunked, identity\r\n\r\nd\r\n" + BODY + b"\r\n0\r\n\r\n",
        b"transfer-encoding: xchunked\r\n\r\nd\r\n" + BODY + b"\r\n0\r\n\r\n",
        b"transfer-encoding: gzip, chunked\r\n\r\nd\r\n" + BODY + b"\r\n0\r\n\r\n",
        b"transfer-encoding : chunked\r\n\r\nd\r\n" + BODY + b"\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n-d\r\n" + BODY + b"\r\n0\r\n\r\n",
        b"x: a\r\n content-length: 13\r\n\r\n" + BODY,
        b"x: a\rcontent-length: 13\r\n\r\n" + BODY,
        b"x\0: a\r\ncontent-length: 13\r\n\r\n" + BODY,
        b"content-length: 13\n\n" + BODY,
    ],
    ids=repr,
)
async def test_requests_of_which_the_end_is_ambiguous_are_refused(request_bytes: bytes) -> None:
    async with stub_frontend("a") as stub, gateway_of(stub) as gateway:
        begin = b"POST %b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" % CHAT.encode()
        raw = await gateway.raw(begin + request_bytes)
        assert raw.startswith((b"HTTP/1.1 400", b"HTTP/1.1 501")), raw
        assert not stub.received


async def test_a_chunked_request_is_forwarded_with_a_length_and_without_its_trailers() -> None:
    async with stub_frontend("a") as stub, gateway_of(stub) as gateway:
        raw = await gateway.raw(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close, x-secret\r\nx-secret: 1\r\n"
            b"te: trailers\r\nupgrade: h2c\r\nx-minisgl-tenant: root\r\nx-forwarded-for: 9.9.9.9\r\nx-kept: 2\r\n"
            b"transfer-encoding: chunked\r\n\r\n5\r\n"
            + BODY[:5]
            + b"\r\n8\r\n"
            + BODY[5:]
            + b"\r\n0\r\nx-late: 3\r\n\r\n"
        )
        assert parsed(raw).status == 200
        headers = stub.received[0].headers
        assert stub.received[0].body == BODY
        assert headers["content-length"] == "13"
        assert headers["x-kept"] == "2"
        # A proxy on this machine is believed, as by frontends.
        assert headers["x-minisgl-tenant"] == "address 9.9.9.9"
        assert headers["x-forwarded-for"] == "9.9.9.9"
        assert not {"connection", "x-secret", "te", "upgrade", "transfer-encoding", "x-late"} & headers.keys()


@pytest.mark.parametrize("address", ["a:b", "::1::", ":"])
async def test_a_proxy_may_name_a_client_by_any_text(address: str) -> None:
    async with stub_frontend("a") as stub, gateway_of(stub) as gateway:
        answer = await gateway.post(CHAT, {"model": "a"}, f"x-forwarded-for: {address}\r\n")
        assert answer.status == 200
        assert stub.received[0].headers["x-minisgl-tenant"] == f"address {address}"


async def test_hop_by_hop_headers_of_a_response_end_at_the_gateway() -> None:
    async with stub_frontend("a") as stub, gateway_of(stub) as gateway:
        stub.handler = lambda request: request.answer(
            200,
            {},
            "connection: keep-alive, x-inner\r\nx-inner: 1\r\nkeep-alive: timeout=5\r\nx-request-id: no\r\nx: 2\r\n",
        )
        answer = await gateway.post(CHAT, {"model": "a"}, "x-request-id: mine\r\n")
        assert answer.headers["x"] == "2"
        assert answer.headers["x-request-id"] == "mine" == stub.received[0].headers["x-request-id"]
        assert not {"x-inner", "keep-alive"} & answer.headers.keys()


@pytest.mark.parametrize("seed", range(4))
async def test_no_bytes_make_the_gateway_fail(seed: int) -> None:
    """Random changes of valid requests get an answer below 500, or none."""
    rng = random.Random(seed)
    valid = _post(BODY, b"x-a: b\r\n") + b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    async with stub_frontend("a") as stub, gateway_of(stub, limits=GatewayLimits(queue_seconds=1)) as gateway:
        for _ in range(150):
            data = bytearray(valid)
            for _ in range(rng.randrange(1, 6)):
                at = rng.randrange(len(data))
                data[at : at + rng.randrange(3)] = bytes(rng.randrange(256) for _ in range(rng.randrange(4)))
            reader, writer = await gateway.connect()
            writer.write(bytes(data))
            writer.write_eof()
            raw = await asyncio.wait_for(reader.read(), 20)
            writer.close()
            for line in raw.split(b"\r\n"):
                assert not line.startswith(b"HTTP/1.1 5") or line.startswith(b"HTTP/1.1 501"), (bytes(data), raw)
        assert (await gateway.post(CHAT, {"model": "a"})).status == 200


async def test_bodies_and_waiting_requests_are_limited() -> None:
    limits = GatewayLimits(waiting=2, held_bytes=1000, queue_seconds=10)
    async with stub_frontend("a") as stub, gateway_of(stub, limits=limits) as gateway:
        too_long = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 8388609\r\n\r\n"
        assert parsed(await gateway.raw(too_long)).code == "body_too_large"
        await stub.stop()
        waiting = [asyncio.create_task(gateway.post(CHAT, {"model": "a"})) for _ in range(2)]
        while (await gateway.demand("a") or {}).get("held") != 2:
            await asyncio.sleep(0.01)
        answer = await gateway.post(CHAT, {"model": "a"})
        assert (answer.status, answer.code) == (429, "queue_full")
        assert answer.headers["retry-after"]
        await stub.start()
        assert [(await each).status for each in waiting] == [200, 200]
        await stub.stop()
        waiting = [asyncio.create_task(gateway.post(CHAT, {"model": "a", "user": "x" * 900}))]
        while (await gateway.demand("a") or {}).get("held") != 1:
            await asyncio.sleep(0.01)
        assert (await gateway.post(CHAT, {"model": "a", "user": "x" * 900})).code == "queue_full"
        other = {"model": "a", "user": "x" * 300}
        waiting.append(asyncio.create_task(gateway.post(CHAT, other, "x-forwarded-for: 9.9.9.9\r\n")))
        while (await gateway.demand("a") or {}).get("held") != 2:
            assert not waiting[1].done(), "a tenant with less than its share has room"
            await asyncio.sleep(0.01)
        await stub.start()
        assert [(await each).status for each in waiting] == [200, 200]
