"""Default limits of requests that wait because no engine is connected, on a clock that skips waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from minisgl.frontend.config import FrontendConfig
from minisgl.frontend.errors import ApiError
from minisgl.frontend.generation.constraint_check import ConstraintCheck
from minisgl.frontend.generation.endpoint import GenerationEndpoint
from minisgl.frontend.generation.response_format import error_event
from minisgl.frontend.openai.requests import parse_completion
from minisgl.frontend.server.request_record import RequestRecord, attach_record
from minisgl.frontend.server.request_tracker import RequestTracker
from minisgl.frontend.tokenizers import TokenizerPool
from support.skipping_loop import SkippingLoop

MIB = 1 << 20
TENANT = "address 127.0.0.1"


@asynccontextmanager
async def frontend(folder: Path) -> AsyncIterator[tuple[FrontendConfig, TokenizerPool]]:
    """With all its defaults; no tokenizer worker connects."""
    config = FrontendConfig(tokenizer_addresses=(f"ipc://{folder}/text",))
    tokenizers = TokenizerPool(config.tokenizer_addresses, config.stale_seconds, RequestTracker(config.limits))
    tokenizers.start()
    try:
        yield config, tokenizers
    finally:
        await tokenizers.close()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        runner.run(test())


class Client:
    """A client of /v1/completions that notes each part of its response."""

    def __init__(self, config: FrontendConfig, tokenizers: TokenizerPool) -> None:
        self.parts: list[tuple[int, str]] = []
        """Seconds from the request, and status or text."""
        self._began = 0.0
        self._endpoint = GenerationEndpoint(
            tokenizers, config, ConstraintCheck(tokenizers), parse_completion, error_event
        )

    @property
    def seconds(self) -> int:
        """Whole seconds since the request."""
        return round(asyncio.get_running_loop().time() - self._began)

    async def post(self, **body: Any) -> None:
        """Return when the response ends. Raises ApiError."""
        requests = iter([{"type": "http.request", "body": msgspec.json.encode(body)}])

        async def receive() -> dict[str, Any]:
            for request in requests:
                return request
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            part = str(message["status"]) if "status" in message else message["body"].decode()
            self.parts.append((self.seconds, part))

        self._began = asyncio.get_running_loop().time()
        scope: dict[str, Any] = {"type": "http", "headers": []}
        attach_record(scope, RequestRecord(request_id="r", method="POST", path="/", started_at=self._began))
        await self._endpoint(scope, receive, send)


def test_a_held_stream_gets_headers_after_15_s_and_pings_every_15_s_until_60_s(tmp_path: Path) -> None:
    async def wait_in_vain() -> None:
        async with frontend(tmp_path) as (config, tokenizers):
            client = Client(config, tokenizers)
            await client.post(prompt="Hi", stream=True)
        ping = ": ping\n\n"
        *held, (ends_at, error) = client.parts
        assert held == [(15, "200"), (15, ping), (30, ping), (45, ping)]
        assert ends_at == 60 and '"code":"engine_unavailable"' in error

    run(wait_in_vain)


def test_a_whole_answer_is_held_for_60_s(tmp_path: Path) -> None:
    async def wait_in_vain() -> None:
        async with frontend(tmp_path) as (config, tokenizers):
            client = Client(config, tokenizers)
            with pytest.raises(ApiError) as failed:
                await client.post(prompt="Hi")
            assert (client.seconds, failed.value.status, failed.value.code) == (60, 503, "engine_unavailable")
            assert not client.parts

    run(wait_in_vain)


def test_the_operators_word_that_a_model_shall_not_serve_counts_for_30_s(tmp_path: Path) -> None:
    async def say_it_once() -> None:
        async with frontend(tmp_path) as (_, tokenizers):
            tokenizers.set_serving(False)
            await asyncio.sleep(29.9)
            with pytest.raises(ApiError) as refused:
                tokenizers.hold(1, TENANT)
            assert (refused.value.status, refused.value.code) == (503, "not_serving")
            await asyncio.sleep(0.2)
            tokenizers.hold(1, TENANT)
            assert tokenizers.num_held == 1

    run(say_it_once)


def test_bodies_of_64_mib_are_held_and_no_more(tmp_path: Path) -> None:
    async def hold_many() -> None:
        async with frontend(tmp_path) as (config, tokenizers):
            for _ in range(64 * MIB // config.max_body_bytes):
                tokenizers.hold(config.max_body_bytes, TENANT)
            with pytest.raises(ApiError) as refused:
                tokenizers.hold(1, TENANT)
            assert (refused.value.status, refused.value.code) == (429, "queue_full")
            assert tokenizers.num_held == 8

    run(hold_many)
