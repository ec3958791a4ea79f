"""POST /v1/chat/completions and /v1/completions, from the body to the last byte of the answer.

A client gets its full answer or an error. Headers of success are sent only when the engine has queued the request. A
stream that cannot be completed ends in an error event, and then the connection breaks without the end that HTTP
promises, so that no client can take it for a whole answer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from minisgl.frontend.answers import DONE, PING, Chunks, Head, whole
from minisgl.frontend.body import read_json_body
from minisgl.frontend.config import FrontendConfig
from minisgl.frontend.errors import ApiError, ClientGone
from minisgl.frontend.exchange import Exchange, News
from minisgl.frontend.requests import Asked
from minisgl.frontend.tokenizers import UNAVAILABLE, Tokenizers
from minisgl.wire.text import Finished, SamplingDefaults, ServedModel

logger = logging.getLogger(__name__)

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would collect the events otherwise.
    (b"x-accel-buffering", b"no"),
]


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
        asked = self._parse(body, SamplingDefaults() if model is None else model.defaults)
        name = _served_name(asked.model, model)
        exchange = self._tokenizers.submit(asked.prompts, asked.params)
        watcher = asyncio.create_task(_watch_client(receive, exchange))
        try:
            await self._accepted(exchange)
            head = Head(asked.kind, secrets.token_hex(16), name)
            if asked.stream:
                await self._stream(head, asked, exchange, send)
            else:
                await _answer(head, exchange, send)
        finally:
            watcher.cancel()
            self._tokenizers.release(exchange)

    async def _accepted(self, exchange: Exchange) -> None:
        try:
            async with asyncio.timeout(self._config.accept_seconds):
                await exchange.accepted()
        except TimeoutError:
            seconds = f"{self._config.accept_seconds:g}"
            raise ApiError.of_code(UNAVAILABLE, f"the engine did not queue the request within {seconds} s") from None

    async def _stream(self, head: Head, asked: Asked, exchange: Exchange, send: Send) -> None:
        chunks = Chunks(head, asked.include_usage)
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        try:
            await _send_part(send, chunks.first(len(asked.prompts)))
            while exchange.has_more:
                try:
                    async with asyncio.timeout(self._config.ping_seconds):
                        news = await exchange.news()
                except TimeoutError:
                    await _send_part(send, PING)
                else:
                    await _send_part(send, b"".join(_events(chunks, news)))
        except ApiError as error:
            logger.warning("stream %s is broken off: %s", head.id, error.message)
            await _send_part(send, b"data: " + error.body() + b"\n\n")
            # To return without the last part makes the server drop the connection.
            return
        tail = (chunks.usage(_ends(exchange)) if asked.include_usage else b"") + DONE
        await send({"type": "http.response.body", "body": tail, "more_body": False})


async def _answer(head: Head, exchange: Exchange, send: Send) -> None:
    texts: list[list[str]] = [[] for _ in exchange.finished]
    while exchange.has_more:
        for new in await exchange.news():
            texts[new.choice].append(new.text)
    body = whole(head, ["".join(pieces) for pieces in texts], _ends(exchange))
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _watch_client(receive: Receive, exchange: Exchange) -> None:
    """A handler that only waits is never told that its client has left; this asks."""
    while (await receive())["type"] != "http.disconnect":
        continue
    exchange.fail(ClientGone())


async def _send_part(send: Send, part: bytes) -> None:
    if part:
        await send({"type": "http.response.body", "body": part, "more_body": True})


def _events(chunks: Chunks, news: list[News]) -> list[bytes]:
    events = []
    for new in news:
        if new.text:
            events.append(chunks.text(new.choice, new.text))
        if new.finished is not None:
            events.append(chunks.finish(new.choice, new.finished))
    return events


def _ends(exchange: Exchange) -> list[Finished]:
    return [end for end in exchange.finished if end is not None]


def _served_name(asked: str | None, model: ServedModel | None) -> str:
    """The name that the answer carries: the client's own. Raises ApiError for a model that is not served."""
    if model is None:
        # Which models there are is not known; `submit` says why nothing can be served.
        return asked or ""
    if asked not in (None, model.card.name):
        raise ApiError(
            404,
            "model_not_found",
            f"the model is not served here, only {model.card.name!r}: use that name, or leave the field out",
            "model",
        )
    return model.card.name
