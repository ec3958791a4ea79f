"""The client against a server that misbehaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
import yaml
from aiohttp import web

from minisgl_operator.shell import client as module
from minisgl_operator.shell.client import ApiError, Client, connection
from minisgl_operator.shell.resources import of_kind
from minisgl_operator.shell.server_clock import ServerClock

SERVICES = of_kind("Service")


class Server:
    """Returns its responses in turn, and the last one repeatedly."""

    def __init__(self) -> None:
        self.answers: list[web.Response] = []
        self.delays: list[float] = []
        self.seen: list[str] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.seen.append(f"{request.method} {request.path_qs}")
        if self.delays:
            await asyncio.sleep(self.delays.pop())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        copy = web.Response(status=answer.status, body=answer.body, headers=answer.headers)
        if answer.status == 599:
            assert request.transport is not None
            request.transport.abort()
        return copy


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    monkeypatch.setattr(module, "_FIRST_WAIT", 0.001)
    yield Server()


@pytest.fixture
async def client(server: Server, tmp_path: Path) -> AsyncIterator[Client]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    config = {
        "current-context": "x",
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        "clusters": [{"name": "x", "cluster": {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}}],
        "users": [{"name": "x", "user": {"token": "secret"}}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    async with Client(await connection(tmp_path / "config")) as client:
        yield client
    await runner.cleanup()


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 599])
async def test_transient_errors_are_retried(server: Server, client: Client, status: int) -> None:
    server.answers = [web.Response(status=status)] * 3 + [web.json_response({"fine": True})]
    assert await client.request("PATCH", "/x", body={}) == {"fine": True}
    assert len(server.seen) == 4


async def test_a_request_fails_after_four_attempts(server: Server, client: Client) -> None:
    server.answers = [web.json_response({"reason": "InternalError", "message": "no etcd"}, status=500)]
    with pytest.raises(ApiError, match="no etcd") as error:
        await client.request("GET", "/x")
    assert (error.value.status, error.value.reason, len(server.seen)) == (500, "InternalError", 4)


async def test_a_dry_run_creates_nothing_and_is_sent_once(server: Server, client: Client) -> None:
    server.answers = [web.json_response({"reason": "InternalError", "message": "webhook"}, status=500)]
    with pytest.raises(ApiError, match="webhook"):
        await client.dry_run(SERVICES, "team-a", {})
    assert server.seen == ["POST /api/v1/namespaces/team-a/services?fieldManager=minisgl-operator&dryRun=All"]


async def test_a_server_is_busy_while_it_answers_slowly_and_one_slow_answer_does_not_count(
    server: Server, client: Client
) -> None:
    server.answers = [web.json_response({})]
    server.delays = [0.5]
    await client.request("GET", "/x")
    assert not client.server_is_busy
    server.delays = [0.5] * 8
    await asyncio.gather(*(client.request("GET", "/x") for _ in range(8)))
    assert client.server_is_busy
    for _ in range(32):
        await client.request("GET", "/x")
    assert not client.server_is_busy


@pytest.mark.parametrize("status", [400, 403, 404, 409, 422])
async def test_a_rejected_request_is_not_retried(server: Server, client: Client, status: int) -> None:
    server.answers = [web.json_response({"reason": "Why", "message": "no"}, status=status)]
    with pytest.raises(ApiError) as error:
        await client.request("PATCH", "/x", body={})
    assert (error.value.status, error.value.reason, error.value.message) == (status, "Why", "no")
    assert len(server.seen) == 1


async def test_a_terminating_namespace_has_its_own_reason(server: Server, client: Client) -> None:
    cause = {"reason": "NamespaceTerminating", "message": "namespace x is being terminated"}
    refusal = {"reason": "Forbidden", "message": "no", "details": {"causes": [cause]}}
    server.answers = [web.json_response(refusal, status=403)]
    with pytest.raises(ApiError) as error:
        await client.request("PATCH", "/x", body={})
    assert error.value.reason == "NamespaceTerminating"


async def test_the_response_of_a_proxy_is_quoted(server: Server, client: Client) -> None:
    server.answers = [web.Response(status=407, text="<html>log in first</html>")]
    with pytest.raises(ApiError, match="log in first"):
        await client.request("GET", "/x")


async def test_retry_after_is_honoured_up_to_a_limit(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    server.answers = [
        web.Response(status=429, headers={"Retry-After": "2"}),
        web.Response(status=429, headers={"Retry-After": "3600"}),
        web.Response(status=429, headers={"Retry-After": "soon"}),
        web.json_response({}),
    ]
    await client.request("GET", "/x")
    assert waits[:2] == [2, 5] and waits[2] < 2


async def test_lists_are_paged_and_their_items_have_a_kind(server: Server, client: Client) -> None:
    first = {"metadata": {"resourceVersion": "7", "continue": "more"}, "items": [{"metadata": {"name": "a"}}]}
    second = {"metadata": {"resourceVersion": "7"}, "items": [{"metadata": {"name": "b"}}]}
    server.answers = [web.json_response(first), web.json_response(second)]
    pages = [page async for page in client.pages(SERVICES, "ns", "a=b")]
    assert [item["metadata"]["name"] for page in pages for item in page.items] == ["a", "b"]
    assert all(item["kind"] == "Service" and item["apiVersion"] == "v1" for page in pages for item in page.items)
    assert "continue=more" in server.seen[1] and "labelSelector=a%3Db" in server.seen[1]


async def test_a_response_above_the_size_limit_is_aborted(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_RESPONSE", 1000)
    server.answers = [web.Response(body=b"x" * 5000)]
    with pytest.raises(ApiError, match="larger than"):
        await client.request("GET", "/x")


@pytest.mark.parametrize("skew", [-300, 0, 300])
async def test_the_clock_is_the_api_servers(server: Server, client: Client, skew: int) -> None:
    theirs = datetime.now(UTC) + timedelta(seconds=skew)
    server.answers = [web.json_response({}, headers={"Date": format_datetime(theirs.replace(microsecond=0))})]
    await client.request("GET", "/x")
    assert abs((client.now() - theirs).total_seconds()) < 10
    server.answers = [web.json_response({"reason": "InternalError"}, status=404, headers={"Date": "no date"})]
    with pytest.raises(ApiError):
        await client.request("GET", "/x")
    assert abs((client.now() - theirs).total_seconds()) < 10, "a header that is no date changes nothing"


def test_the_clock_of_the_server_moves_only_when_a_response_contradicts_it() -> None:
    elapsed = [1000.0]
    clock = ServerClock(wall=lambda: 1_700_000_000.0, monotonic=lambda: elapsed[0])
    start = datetime.fromtimestamp(1_700_000_000, UTC)
    assert clock.now() == start
    clock.observe(format_datetime(start), sent=999.5)
    assert clock.now() == start, "the Date has no fractions"
    clock.observe(None, sent=999.5)
    assert clock.now() == start
    # Five minutes behind; the answer took 4 s, in which the server may have read its clock at any moment.
    behind = start - timedelta(seconds=300)
    clock.observe(format_datetime(behind), sent=996.0)
    assert behind <= clock.now() <= behind + timedelta(seconds=5)
    clock.observe(format_datetime(behind), sent=999.9)
    assert behind <= clock.now() <= behind + timedelta(seconds=1.1)
    elapsed[0] += 60
    assert behind + timedelta(seconds=60) <= clock.now() <= behind + timedelta(seconds=61.1)
