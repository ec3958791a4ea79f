"""POST /v1/chat/completions, /v1/completions and /generate, from the body to the last byte of the answer.

A client gets its full answer or an error. Headers of success are sent only when the engine has queued the request. A
stream that cannot be completed ends in an error event, and then the connection breaks without the end that HTTP
promises, so that no client can take it for a whole answer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from minisgl.frontend.config import FrontendConfig
from minisgl.frontend.errors import ApiError, ClientGone
from minisgl.frontend.native.answers import NativeChunks, PlainChunks, whole_native
from minisgl.frontend.openai.answers import PING, Choice, Chunks, Head, whole
from minisgl.frontend.openai.bodies import DEFAULT_MODEL
from minisgl.frontend.openai.choices import requests_of
from minisgl.frontend.openai.requests import Asked
from minisgl.frontend.openai.unknown_fields import refuse_if_strict
from minisgl.frontend.server.body import read_json_body
from minisgl.frontend.server.direct_writes import WRITE
from minisgl.frontend.server.response_stream import Delta, ResponseStream
from minisgl.frontend.server.traffic import describe_request, name_answer
from minisgl.frontend.tokenizers import UNAVAILABLE, Tokenizers
from minisgl.wire.text import Finished, SamplingDefaults, ScoredToken, ServedModel

logger = logging.getLogger(__name__)

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would collect the events otherwise.
    (b"x-accel-buffering", b"no"),
]

_LARGE_BODY_BYTES: Final = 256 << 10


class GenerationEndpoint:
    """An ASGI application. `parse` turns a body into what it asks for."""

    def __init__(
        self, tokenizers: Tokenizers, config: FrontendConfig, parse: Callable[[bytes, SamplingDefaults], Asked]
    ) -> None:
        self._tokenizers = tokenizers
        self._config = config
        self._parse = parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._serve(scope, receive, send)
        except ClientGone:
            return

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_json_body(scope, receive, self._config.max_body_bytes)
        model = self._tokenizers.model
        defaults = SamplingDefaults() if model is None else model.defaults
        if len(body) > _LARGE_BODY_BYTES:
            # Streams go on meanwhile.
            asked = await asyncio.to_thread(self._parse, body, defaults)
        else:
            asked = self._parse(body, defaults)
        headers = Headers(scope=scope)
        refuse_if_strict(headers, asked.ignored)
        name = served_name(asked.model, model)
        describe_request(name, asked.n)
        exchange = self._tokenizers.submit(requests_of(asked, headers))
        watcher = asyncio.create_task(_watch_client(receive, exchange))
        try:
            await self._accepted(exchange)
            answer_id = secrets.token_hex(16)
            name_answer(answer_id)
            if asked.stream:
                write = scope.get("extensions", {}).get(WRITE, {}).get("write")
                await self._stream(answer_id, _chunks(answer_id, name, asked, exchange), asked, exchange, send, write)
            else:
                await _answer(answer_id, name, asked, exchange, send)
        finally:
            watcher.cancel()
            self._tokenizers.release(exchange)

    async def _accepted(self, exchange: ResponseStream) -> None:
        try:
            async with asyncio.timeout(self._config.accept_seconds):
                await exchange.accepted()
        except TimeoutError:
            seconds = f"{self._config.accept_seconds:g}"
            raise ApiError.of_code(UNAVAILABLE, f"the engine did not queue the request within {seconds} s") from None

    async def _stream(
        self,
        answer_id: str,
        chunks: _Chunks,
        asked: Asked,
        exchange: ResponseStream,
        send: Send,
        write: Callable[[bytes], bool] | None,
    ) -> None:
        headers = [*_STREAM_HEADERS, *_ignored_header(asked)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        silence = _Silence(self._config.ping_seconds, exchange)
        fast_path = None
        if write is not None and isinstance(chunks, Chunks) and chunks.only_texts:
            fast_path = partial(_write_text, write, chunks, silence)
        try:
            await _send_part(send, chunks.first())
            while exchange.has_more:
                silence.begin()
                news = await exchange.news(fast_path)
                await _send_part(send, b"".join([chunks.event(new) for new in news]) if news else PING)
        except ApiError as error:
            logger.warning("stream %s is broken off: %s", answer_id, error.message)
            await _send_part(send, b"data: " + error.body() + b"\n\n")
            # To return without the last part makes the server drop the connection.
            return
        finally:
            silence.end()
        await send({"type": "http.response.body", "body": chunks.last(_ends(exchange)), "more_body": False})


class _Silence:
    """Interrupts whoever has waited for news for so many seconds. One timer for the whole stream: one for each wait
    costs a quarter of the CPU time of a token."""

    def __init__(self, seconds: float, exchange: ResponseStream) -> None:
        self._seconds = seconds
        self._exchange = exchange
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._timer = self._loop.call_later(seconds, self._check)

    def begin(self) -> None:
        self._since = self._loop.time()

    def end(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        left = self._since + self._seconds - self._loop.time()
        if left <= 0:
            self._exchange.interrupt()
            left = self._seconds
        self._timer = self._loop.call_later(left, self._check)


class _Chunks(Protocol):
    """The form of a stream."""

    def first(self) -> bytes: ...
    def event(self, news: Delta) -> bytes: ...
    def last(self, ends: Sequence[Finished]) -> bytes: ...


def _chunks(answer_id: str, model: str, asked: Asked, exchange: ResponseStream) -> _Chunks:
    match asked.kind:
        case "plain":
            return PlainChunks()
        case "native":
            return NativeChunks(answer_id, exchange.prompt_tokens, listed=asked.listed)
        case kind:
            return Chunks(
                Head(kind, answer_id, model),
                exchange.prompt_tokens,
                asked.n,
                scored=asked.params.logprobs is not None,
                include_usage=asked.include_usage,
                continuous_usage=asked.continuous_usage,
            )


async def _answer(answer_id: str, model: str, asked: Asked, exchange: ResponseStream, send: Send) -> None:
    texts: list[list[str]] = [[] for _ in exchange.finished]
    scored: list[list[ScoredToken]] = [[] for _ in exchange.finished]
    while exchange.has_more:
        for new in await exchange.news():
            texts[new.choice].append(new.text)
            scored[new.choice].extend(new.scored)
    choices = [
        Choice("".join(text), tokens, end) for text, tokens, end in zip(texts, scored, _ends(exchange), strict=True)
    ]
    match asked.kind:
        case "native" | "plain":
            body = whole_native(answer_id, choices, listed=asked.listed)
        case kind:
            with_scores = asked.params.logprobs is not None
            body = whole(Head(kind, answer_id, model), choices, asked.n, scored=with_scores)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *_ignored_header(asked),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _ignored_header(asked: Asked) -> list[tuple[bytes, bytes]]:
    return [(b"x-ignored-params", ", ".join(asked.ignored).encode())] if asked.ignored else []


async def _watch_client(receive: Receive, exchange: ResponseStream) -> None:
    """A handler that only waits is never told that its client has left; this asks."""
    while (await receive())["type"] != "http.disconnect":
        continue
    exchange.fail(ClientGone())


def _write_text(write: Callable[[bytes], bool], chunks: Chunks, silence: _Silence, text: str) -> bool:
    silence.begin()
    return write(chunks.text_event(text))


async def _send_part(send: Send, part: bytes) -> None:
    if part:
        await send({"type": "http.response.body", "body": part, "more_body": True})


def _ends(exchange: ResponseStream) -> list[Finished]:
    return [end for end in exchange.finished if end is not None]


def served_name(asked: str | None, model: ServedModel | None) -> str:
    """The name that the answer carries: the client's own. Raises ApiError for a model that is not served."""
    if model is None:
        # Which models there are is not known; `submit` says why nothing can be served.
        return asked or ""
    if asked not in (None, DEFAULT_MODEL, *model.all_names):
        raise ApiError(
            404,
            "model_not_found",
            f"the model is not served here, only {model.card.name!r}: use that name, or leave the field out",
            "model",
        )
    return model.card.name if asked is None else asked
