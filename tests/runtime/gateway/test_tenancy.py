"""Keys and limits of a running gateway."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from minisgl.gateway.tenancy import Account
from support.gateway.running import RunningGateway, gateway_of, until
from support.gateway.stub_frontend import Received, stub_frontend

CHAT = "/v1/chat/completions"
KEYS = """
tenants:
- {name: search, keys: [sk-search], models: [a], requestsPerMinute: 3, tokensPerMinute: 100, priority: 4}
- {name: all, keys: [sk-all], maxConcurrent: 1}
"""
SEARCH, ALL = "authorization: Bearer sk-search\r\n", "x-api-key: sk-all\r\n"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS)
    return file


async def use(request: Received) -> None:
    """Report 60 tokens."""
    await request.answer(200, {}, 'x-minisgl-usage: {"prompt_tokens":20,"completion_tokens":40}\r\n')


async def test_a_key_decides_about_models(keys: Path) -> None:
    async with stub_frontend("a") as a, stub_frontend("b") as b, gateway_of(a, b, keys=str(keys)) as gateway:
        refused = await gateway.post(CHAT, {"model": "a"})
        assert (refused.status, refused.code) == (401, "missing_api_key")
        refused = await gateway.post("/v1/messages", {"model": "a"}, "x-api-key: sk-other\r\n")
        assert (refused.status, refused.json["error"]["type"]) == (401, "authentication_error")
        assert (await gateway.get("/v1/models")).status == 401
        assert (await gateway.post(CHAT, {"model": "b"}, SEARCH)).code == "model_not_found"
        assert [entry["id"] for entry in (await gateway.get("/v1/models", SEARCH)).json["data"]] == ["a"]
        assert (await gateway.get("/v1/models/b", SEARCH)).status == 404
        assert (await gateway.get("/health")).status == 200
        assert not a.received and not b.received
        answer = await gateway.post(CHAT, {"model": "a"}, SEARCH)
        assert answer.status == 200
        headers = a.received[0].headers
        assert "authorization" not in headers, "the key ends at the gateway"
        assert headers["x-minisgl-tenant"] == "key search"
        assert headers["x-minisgl-priority"] == "4"


async def test_used_tokens_count_and_requests_are_limited(keys: Path) -> None:
    async with stub_frontend("a", handler=use) as stub, gateway_of(stub, keys=str(keys)) as gateway:
        first = await gateway.post(CHAT, {"model": "a"}, SEARCH)
        assert first.status == 200
        assert first.headers["x-ratelimit-limit-requests"] == "3"
        assert first.headers["x-ratelimit-remaining-requests"] == "2"
        second = await gateway.post(CHAT, {"model": "a"}, SEARCH)
        assert second.status == 200
        assert 40 <= int(second.headers["x-ratelimit-remaining-tokens"]) <= 60
        third = await gateway.post(CHAT, {"model": "a"}, SEARCH)
        assert (third.status, third.code) == (429, "rate_limit_exceeded")
        assert "100 tokens per minute" in third.json["error"]["message"]
        assert int(third.headers["retry-after"]) > 0
        assert len(stub.received) == 2
        idle = (await gateway.demand("a"))["idle_seconds"]
        await gateway.post(CHAT, {"model": "a"}, SEARCH)
        assert (await gateway.demand("a"))["idle_seconds"] >= idle, "a refused request does not use the model"
        page = await gateway.metrics()
        assert 'minisgl:gateway_requests_total{component="gateway",tenant="search",model="a"} 2' in page
        assert 'minisgl:gateway_completion_tokens_total{component="gateway",tenant="search",model="a"} 80' in page


async def test_a_probe_counts_what_it_generates_and_keeps_no_model_awake(keys: Path) -> None:
    async with stub_frontend("a", handler=use) as stub, gateway_of(stub, keys=str(keys)) as gateway:
        answer = await gateway.get("/health_generate", SEARCH)
        assert (answer.status, answer.headers["x-ratelimit-remaining-requests"]) == (200, "2")
        assert (await gateway.get("/model_info", SEARCH)).status == 200
        page = await gateway.metrics()
        assert 'minisgl:gateway_requests_total{component="gateway",tenant="search",model="a"} 1' in page
        assert 'minisgl:gateway_completion_tokens_total{component="gateway",tenant="search",model="a"} 40' in page
        assert await gateway.demand("a") is None
        answer = await gateway.get("/health_generate", SEARCH)
        assert answer.status == 429, "both have used more tokens than a minute has"


@pytest.mark.parametrize("tokens", ["-1000", "1000000000000", "9" * 401], ids=len)
async def test_a_report_of_numbers_that_no_request_has_changes_no_limit(keys: Path, tokens: str) -> None:
    async def report(request: Received) -> None:
        header = f'x-minisgl-usage: {{"prompt_tokens":20,"completion_tokens":{tokens}}}\r\n'
        await request.answer(200, {}, header)

    async with stub_frontend("a", handler=report) as stub, gateway_of(stub, keys=str(keys)) as gateway:
        for _ in range(2):
            answer = await gateway.post(CHAT, {"model": "a"}, SEARCH)
            assert (answer.status, answer.headers["x-ratelimit-remaining-tokens"]) == (200, "100")
        await until(lambda: _is_idle(gateway))


async def test_a_fault_in_the_count_of_tokens_keeps_no_model_awake(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OverflowError

    monkeypatch.setattr(Account, "end", fail)
    async with stub_frontend("a") as stub, gateway_of(stub, keys=str(keys)) as gateway:
        await gateway.post(CHAT, {"model": "a"}, SEARCH)
        await until(lambda: _is_idle(gateway))


async def _is_idle(gateway: RunningGateway) -> bool:
    return bool((await gateway.demand("a"))["idle_seconds"] > 0)


async def test_metrics_of_tenants_need_a_key_where_clients_are(keys: Path) -> None:
    async with stub_frontend("a") as stub, gateway_of(stub, keys=str(keys)) as gateway:
        assert (await gateway.get("/metrics")).status == 401
        assert (await gateway.get("/metrics", SEARCH)).status == 200
        assert "minisgl:gateway_models" in await gateway.metrics()


async def test_a_stream_that_its_client_leaves_counts_its_events(keys: Path) -> None:
    async def stream(request: Received) -> None:
        await request.begin_stream('x-minisgl-usage: {"prompt_tokens":3,"completion_tokens":0}\r\n')
        await request.piece(b"data: 1\n\n" * 5 + b": ping\n\ndata: 2\n\n")
        await request.client_left()

    async with stub_frontend("a", handler=stream) as stub, gateway_of(stub, keys=str(keys)) as gateway:
        await _leave(gateway, b"data: 2\n\n")
        page = await gateway.metrics()
        assert 'gateway_prompt_tokens_total{component="gateway",tenant="search",model="a"} 3' in page
        assert 'gateway_completion_tokens_total{component="gateway",tenant="search",model="a"} 6' in page


async def test_a_request_that_its_client_leaves_at_once_counts_an_estimate_of_its_prompt(keys: Path) -> None:
    async with stub_frontend("a", handler=Received.client_left) as stub, gateway_of(stub, keys=str(keys)) as gateway:
        waiting = asyncio.create_task(_leave(gateway, b"nothing"))
        await until(lambda: stub.received)
        waiting.cancel()
        await until(lambda: _is_idle(gateway))
        page = await gateway.metrics()
        assert 'gateway_prompt_tokens_total{component="gateway",tenant="search",model="a"} 10' in page


async def _leave(gateway: RunningGateway, after: bytes) -> None:
    """Send a body of 40 bytes, and leave when these bytes have arrived."""
    reader, writer = await gateway.connect()
    body = b'{"model":"a","stream":true,"user":"123"}'
    writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\n{SEARCH}content-length: {len(body)}\r\n\r\n".encode())
    writer.write(body)
    try:
        await reader.readuntil(after)
    finally:
        writer.transport.abort()
    await until(lambda: _is_idle(gateway))


async def test_invalid_requests_use_nothing_of_a_limit(keys: Path) -> None:
    async with stub_frontend("a") as stub, gateway_of(stub, keys=str(keys)) as gateway:
        for _ in range(5):
            assert (await gateway.post(CHAT, {"model": "x"}, SEARCH)).status == 404
        assert (await gateway.post(CHAT, {"model": "a"}, SEARCH)).headers["x-ratelimit-remaining-requests"] == "2"


async def test_concurrent_requests_of_a_tenant_are_limited_until_they_end(keys: Path) -> None:
    release = asyncio.Event()

    async def wait(request: Received) -> None:
        await release.wait()
        await request.answer(200, {})

    async with stub_frontend("a", handler=wait) as stub, gateway_of(stub, keys=str(keys)) as gateway:
        waiting = asyncio.create_task(gateway.post(CHAT, {"model": "a"}, ALL))
        await until(lambda: stub.received)
        assert (await gateway.post(CHAT, {"model": "a"}, ALL)).status == 429
        release.set()
        assert (await waiting).status == 200
        assert (await gateway.post(CHAT, {"model": "a"}, ALL)).status == 200


async def test_a_changed_file_is_read_again_and_a_broken_one_is_not(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with stub_frontend("a") as stub, gateway_of(stub, keys=str(keys)) as gateway:

        async def is_accepted() -> bool:
            return (await gateway.get("/v1/models", "x-api-key: sk-new\r\n")).status == 200

        assert not await is_accepted()
        keys.write_text("tenants: [{name: new, keys: [sk-new]}]")
        await until(is_accepted)
        assert (await gateway.get("/v1/models", ALL)).status == 401
        keys.write_text("tenants: [{name: new, keys: [sk-newest")

        async def is_reported() -> bool:
            return await is_accepted() and "keeping the previous keys" in caplog.text

        await until(is_reported)
        assert await is_accepted()
        assert "sk-" not in caplog.text


async def test_keys_of_clients_reach_frontends_where_the_gateway_has_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with stub_frontend("a") as stub, gateway_of(stub) as gateway:
        await gateway.post(CHAT, {"model": "a"}, "authorization: Bearer sk-mine\r\n")
        assert stub.received[0].headers["authorization"] == "Bearer sk-mine"
        assert "sk-mine" not in caplog.text
