"""Limits that several gateways count together in Redis, and what holds while it does not answer.

`MINISGL_TEST_REDIS=redis://HOST:PORT` runs the tests that need no clock or fault of their own with a real server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.frontend.errors import ApiError
from minisgl.gateway import shared_limits
from minisgl.gateway.config import RedisOptions
from minisgl.gateway.keys import Tenant
from minisgl.gateway.limits import Bucket
from minisgl.gateway.shared_limits import SCRIPT, RedisError, SharedLimits
from minisgl.gateway.tenancy import Account
from support.gateway.fake_redis import FakeRedis, fake_redis
from support.gateway.running import WAIT_SECONDS, Answer, RunningGateway, gateway_of, until
from support.gateway.stub_frontend import Received, stub_frontend

CHAT = "/v1/chat/completions"
REDIS = FakeRedis()
"""It is not started: tests run its scripts."""


@contextlib.asynccontextmanager
async def redis_url() -> AsyncIterator[str]:
    """Return the URL of a Redis: a real one, if there is one."""
    if real := os.environ.get("MINISGL_TEST_REDIS"):
        yield real
    else:
        async with fake_redis() as redis:
            yield redis.url


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Tenants that no other test has: a real Redis keeps their counts."""
    own = uuid.uuid4().hex
    file = tmp_path / "keys.yaml"
    file.write_text(f"""
tenants:
- {{name: search-{own}, keys: [sk-search], requestsPerMinute: 4}}
- {{name: tokens-{own}, keys: [sk-tokens], tokensPerMinute: 100}}
- {{name: free-{own}, keys: [sk-free], maxConcurrent: 1}}
""")
    return file


async def use(request: Received) -> None:
    """Report 60 tokens."""
    await request.answer(200, {}, 'x-minisgl-usage: {"prompt_tokens":20,"completion_tokens":40}\r\n')


async def post(gateway: RunningGateway, key: str) -> Answer:
    return await gateway.post(CHAT, {"model": "a"}, f"x-api-key: {key}\r\n")


async def counts(gateway: RunningGateway) -> bool:
    return 'minisgl:gateway_shared_limits_up{component="gateway"} 1' in await gateway.metrics()


async def counts_alone(gateway: RunningGateway) -> bool:
    return 'minisgl:gateway_shared_limits_up{component="gateway"} 0' in await gateway.metrics()


@contextlib.asynccontextmanager
async def two_gateways(options: RedisOptions, keys: Path) -> AsyncIterator[list[RunningGateway]]:
    """Run two gateways, which count in Redis once they are given."""
    async with contextlib.AsyncExitStack() as stack:
        stub = await stack.enter_async_context(stub_frontend("a", handler=use))
        gateways = [
            await stack.enter_async_context(gateway_of(stub, keys=str(keys), redis=options)) for _ in range(2)
        ]
        for gateway in gateways:
            await until(lambda gateway=gateway: counts(gateway))
        yield gateways


async def test_two_gateways_have_the_limits_of_one(keys: Path) -> None:
    async with redis_url() as url, two_gateways(RedisOptions(url=url), keys) as (one, other):
        answers = [await post(gateway, "sk-search") for gateway in (one, other) * 2]
        assert [answer.status for answer in answers] == [200] * 4
        remaining = [answer.headers["x-ratelimit-remaining-requests"] for answer in answers]
        assert remaining == ["3", "2", "1", "0"]
        for gateway in (one, other):
            refused = await post(gateway, "sk-search")
            assert (refused.status, refused.code) == (429, "rate_limit_exceeded")
            assert "4 requests per minute" in refused.json["error"]["message"]
            assert 1 <= int(refused.headers["retry-after"]) <= 15
        for _ in range(2):
            assert (await post(one, "sk-tokens")).status == 200
        refused = await post(other, "sk-tokens")
        assert "100 tokens per minute" in refused.json["error"]["message"], "it never had a request of this tenant"
        assert (await post(other, "sk-free")).status == 200
        assert 'gateway_shared_limits_missed_total{component="gateway"} 0' in await one.metrics()


async def test_a_rejected_request_takes_no_place_of_those_in_progress(keys: Path) -> None:
    async with redis_url() as url:
        shared = SharedLimits(RedisOptions(url=url))
        async with _running(shared):
            tenant = Tenant(name=f"x-{uuid.uuid4().hex}", requests_per_minute=2, max_concurrent=2)
            account = Account(tenant, 0.0, shared)
            for _ in range(2):
                await account.admit(lambda: 0.0)
            with pytest.raises(ApiError, match="2 requests of this key's tenant are in progress"):
                await account.admit(lambda: 0.0)
            account.end(5, 0.0)
            with pytest.raises(ApiError, match="used its 2 requests per minute"):
                await account.admit(lambda: 0.0)
            assert account.running == 1


async def test_other_limits_keep_what_was_used() -> None:
    async with redis_url() as url:
        shared, name = SharedLimits(RedisOptions(url=url)), f"x-{uuid.uuid4().hex}"
        async with _running(shared):
            shared.use(Tenant(name=name, tokens_per_minute=100), 90)
            for limit in (1000, 50, 2000, 100):
                counted = await shared.begin(Tenant(name=name, tokens_per_minute=limit))
                assert counted is not None
                assert counted.admitted == (limit > 90)
                assert counted.missing_tokens == pytest.approx(90, abs=40)
            counted = await shared.begin(Tenant(name=name, requests_per_minute=5))
            assert counted is not None
            assert (counted.admitted, counted.missing_requests) == (True, 1)


@contextlib.asynccontextmanager
async def _running(shared: SharedLimits) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(shared.run())
    try:
        await until(lambda: shared.is_up)
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


_RATE = st.integers(1, 300)
_STEPS = st.lists(st.tuples(st.floats(0, 40), st.integers(0, 400)), min_size=1, max_size=30)


@given(_RATE, _RATE, _STEPS)
def test_the_script_counts_as_buckets_do(request_rate: int, token_rate: int, steps: list[tuple[float, int]]) -> None:
    """A step without units is a request."""
    REDIS.hashes.clear()
    REDIS.expires.clear()
    begin = REDIS.now
    requests, tokens = Bucket(request_rate, 0.0), Bucket(token_rate, 0.0)
    for pause, units in steps:
        REDIS.now = round(REDIS.now + pause, 6)
        now = REDIS.now - begin
        taken = (0, units, 0) if units else (1, 0, 1)
        arguments = [str(each) for each in (request_rate, token_rate, *taken)]
        admitted, *missing = REDIS.evaluate(SCRIPT, ["r", "t"], arguments)
        if units:
            assert admitted == 1
            tokens.take(units, now)
        else:
            wait = max(bucket.seconds_until(1, now) for bucket in (requests, tokens))
            if 0 < wait < 1e-3:
                return  # Rounding decides.
            assert admitted == (wait == 0)
            if admitted:
                requests.take(1, now)
        for bucket, found in zip((requests, tokens), missing, strict=True):
            wait = bucket.seconds_until_full(now)
            assert float(found) == pytest.approx(wait * bucket.per_minute / 60, abs=1e-3)


def test_counts_are_forgotten_when_the_bucket_is_full() -> None:
    REDIS.evaluate(SCRIPT, ["full-r", "full-t"], ["60", "600", "0", "900", "0"])
    assert "full-r" not in REDIS.hashes, "what was not used is not written"
    assert REDIS.expires["full-t"] == pytest.approx(REDIS.now + 91)


async def test_a_gateway_goes_on_alone_while_redis_is_lost(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with fake_redis() as redis, two_gateways(RedisOptions(url=redis.url), keys) as (one, other):
        assert (await post(one, "sk-search")).headers["x-ratelimit-remaining-requests"] == "3"
        await redis.stop()
        answers = [(await post(one, "sk-search")).status for _ in range(5)]
        assert await counts_alone(one)
        assert answers == [200, 200, 200, 429, 429], "it goes on from what it heard last"
        assert (await post(other, "sk-tokens")).status == 200
        assert 'gateway_shared_limits_missed_total{component="gateway"} 5' in await one.metrics()
        assert "this gateway counts for itself" in caplog.text
        await redis.start()
        for gateway in (one, other):
            await until(lambda gateway=gateway: counts(gateway))
        assert (await post(one, "sk-search")).headers["x-ratelimit-remaining-requests"] == "2"
        assert (await post(other, "sk-search")).headers["x-ratelimit-remaining-requests"] == "1"


@pytest.mark.parametrize("fault", ["is_silent", "refusal"])
async def test_a_redis_that_does_not_count_delays_nothing(
    keys: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with fake_redis() as redis, two_gateways(RedisOptions(url=redis.url), keys) as (one, _):
        setattr(redis, fault, "READONLY You can't write against a read only replica.")
        assert (await post(one, "sk-search")).status == 200
        assert await counts_alone(one)
        assert ("no answer in time" if fault == "is_silent" else "read only replica") in caplog.text
        setattr(redis, fault, "")
        await until(lambda: counts(one))
        assert (await post(one, "sk-search")).status == 200


async def test_it_ends_at_each_moment_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_limits, "_IDLE_SECONDS", 3600.0)
    async with fake_redis() as redis:
        for turns in range(8):
            shared = SharedLimits(RedisOptions(url=redis.url))
            async with _running(shared) as task:
                shared.use(Tenant(name="a", tokens_per_minute=9), 1)
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task}, timeout=WAIT_SECONDS)
                assert task.done()


async def test_a_request_waits_for_its_own_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_redis() as redis:
        shared, tenant = SharedLimits(RedisOptions(url=redis.url)), Tenant(name="a", requests_per_minute=9)
        async with _running(shared):
            # Redis may take its time for what comes before.
            monkeypatch.setattr(shared_limits, "_ANSWER_SECONDS", 3600.0)
            monkeypatch.setattr(shared_limits, "_WAIT_SECONDS", 0.01)
            redis.is_silent = True
            assert await asyncio.gather(*(shared.begin(tenant) for _ in range(3))) == [None] * 3
            assert (shared.missed, shared.is_up) == (3, True)


async def test_requests_that_wait_no_longer_are_not_counted_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_limits, "_BATCH", 1)
    async with fake_redis() as redis:
        shared, tenant = SharedLimits(RedisOptions(url=redis.url)), Tenant(name="a", requests_per_minute=9)
        async with _running(shared):
            with monkeypatch.context() as hurried:
                hurried.setattr(shared_limits, "_WAIT_SECONDS", 0.0)
                assert await asyncio.gather(*(shared.begin(tenant) for _ in range(3))) == [None] * 3
            counted = await shared.begin(tenant)
            assert counted is not None
            assert counted.missing_requests <= 2, "at most one was on its way when its time was over"


async def test_a_redis_that_is_too_slow_for_requests_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(shared_limits, "_ANSWER_SECONDS", 0.0)
    async with fake_redis() as redis:
        shared = SharedLimits(RedisOptions(url=redis.url))
        task = asyncio.create_task(shared.run())
        await until(lambda: "no answer in time" in caplog.text)
        task.cancel()
        await asyncio.wait({task})
    assert "together with other gateways" not in caplog.text, "no request found out"


@pytest.mark.parametrize("written", ["inf", "nan", "1e308"])
async def test_a_number_that_is_no_count_is_not_believed(written: str) -> None:
    async with fake_redis() as redis:
        shared = SharedLimits(RedisOptions(url=redis.url))
        async with _running(shared):
            redis.hashes["minisgl:limits:{a}:requests"] = {"missing": written, "at": str(redis.now)}
            account = Account(Tenant(name="a", requests_per_minute=2), 0.0, shared)
            for _ in range(2):
                await account.admit(lambda: 0.0)
            with pytest.raises(ApiError, match="used its 2 requests per minute"):
                await account.admit(lambda: 0.0)
            assert (shared.missed, shared.is_up) == (3, True)


async def test_the_password_is_that_of_the_file_and_in_no_log(
    keys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "password"
    file.write_text("wrong-secret\n")
    async with fake_redis("right-secret") as redis, stub_frontend("a") as stub:
        options = RedisOptions(url=redis.url.replace("//", "//limits@"), password_file=str(file))
        async with gateway_of(stub, keys=str(keys), redis=options) as gateway:
            await until(lambda: "counts for itself" in caplog.text)
            assert (await post(gateway, "sk-search")).status == 200
            file.write_text("right-secret\n")
            await until(lambda: counts(gateway))
            assert (await post(gateway, "sk-search")).status == 200
        assert "secret" not in caplog.text


SECRET = "very-secret"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        (f"redis://:{SECRET}@host", "--redis-password-file"),
        (f"redis://me:{SECRET}@host:1/2", "--redis-password-file"),
        (f"redis://{SECRET}@host", "--redis-password-file"),
        (f"http://:{SECRET}@host", "redis://HOST:PORT"),
        (f"redis://host/{SECRET}", "redis://HOST:PORT"),
        (f"redis://host:{SECRET}", "redis://HOST:PORT"),
        (f"redis://host?password={SECRET}", "redis://HOST:PORT"),
        (SECRET, "redis://HOST:PORT"),
        (f"redis://[{SECRET}", "redis://HOST:PORT"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_its_password(url: str, problem: str) -> None:
    with pytest.raises(RedisError) as caught:
        SharedLimits(RedisOptions(url=url))
    assert problem in caught.value.message
    assert SECRET not in caught.value.message


def test_a_password_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RedisError, match="cannot read the password"):
        SharedLimits(RedisOptions(url="rediss://me@host:1/2", password_file=str(tmp_path / "none")))
