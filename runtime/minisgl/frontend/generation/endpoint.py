"""ASGI application of POST /v1/chat/completions, /v1/embeddings and all others that need the model.

A client gets its full response or an error. Headers of success are sent when the engine has queued the request; those
of a stream after 15 seconds at the latest. A stream that cannot be completed ends in an error event, and then the
connection breaks without the end that HTTP promises, so that no client can take it for a complete response.

A request is checked before anything else happens to it, also while no engine is routable: a held request may start a
model that is scaled to zero, so only a valid one is held. It is parsed again when an engine is there, because its
defaults depend on the model.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.frontend.config import FrontendConfig
from minisgl.frontend.errors import ENGINE_UNAVAILABLE, ApiError, ClientDisconnected, NotTaken
from minisgl.frontend.generation.constraint_check import ConstraintCheck
from minisgl.frontend.generation.model_names import response_model_name
from minisgl.frontend.generation.request import (
    GenerationRequest,
    check_prompt_lengths,
    deadline_ms,
    generate_messages,
    with_priority,
)
from minisgl.frontend.generation.response_format import CONTINUED, EventFormat
from minisgl.frontend.generation.sampling import outside_vocabulary
from minisgl.frontend.generation.stream_opening import StreamOpening
from minisgl.frontend.generation.tasks import check_task
from minisgl.frontend.server.client_connection import ClientConnection
from minisgl.frontend.server.gateway_headers import given_priority
from minisgl.frontend.server.held_requests import Held
from minisgl.frontend.server.json_body import read_json_body
from minisgl.frontend.server.metrics_page import load_header
from minisgl.frontend.server.request_record import RequestRecord, record_of
from minisgl.frontend.server.response_stream import Delta, ResponseStream
from minisgl.frontend.server.unknown_fields import ignored_params
from minisgl.frontend.server.usage_report import usage_comment, usage_header, usage_of, usage_so_far
from minisgl.frontend.tokenizers import TokenizerPool
from minisgl.wire.text import Finished, SamplingDefaults

logger = logging.getLogger(__name__)

_LARGE_BODY_BYTES: Final = 256 << 10
_LARGE_OUTPUT_BYTES: Final = 64 << 10
"""Of numbers: some milliseconds as JSON."""


class GenerationEndpoint:
    """ASGI application. `parse` validates a body, given the checkpoint's sampling defaults; it raises ApiError.
    `early_error` renders the error of a stream that ends before its answer has begun."""

    def __init__(
        self,
        tokenizers: TokenizerPool,
        config: FrontendConfig,
        constraints: ConstraintCheck,
        parse: Callable[[bytes, SamplingDefaults], GenerationRequest],
        early_error: Callable[[ApiError], bytes],
    ) -> None:
        self._tokenizers = tokenizers
        self._config = config
        self._constraints = constraints
        self._parse = parse
        self._early_error = early_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError."""
        try:
            await self._serve(scope, receive, send)
        except ClientDisconnected:
            return

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        record, requests = record_of(scope), self._tokenizers.requests
        body = await read_json_body(scope, receive, self._config.max_body_bytes)
        opening = StreamOpening(send, body, record.started_at + self._config.header_seconds, self._config.ping_seconds)
        model = self._tokenizers.model
        request: GenerationRequest | None = await self._checked(record, Headers(scope=scope), body)
        if self._tokenizers.must_hold or self._tokenizers.model is not model:
            # Only the body is kept while it waits. A model that has become known meanwhile has defaults of its own.
            request = None
        # Not before: a request that is refused does not use the model, and must not keep it from being scaled to zero.
        requests.begin_generation()
        try:
            while not await self._answer(scope, receive, send, body, request, opening):
                request = None
                requests.withdraw(record)
        except ApiError as error:
            if not opening.is_open:
                raise
            record.error_code, record.error_status = error.code, error.status
            logger.warning("request %s ends in an error: %s", record.request_id, error.message)
            # To return without the last part makes the server drop the connection.
            await _send_part(send, self._early_error(error))
        finally:
            requests.end_generation(asyncio.get_running_loop().time())

    async def _answer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        body: bytes,
        request: GenerationRequest | None,
        opening: StreamOpening,
    ) -> bool:
        """Return False if no worker took the request, although an engine was routable just now. `request`: the body as
        it was checked for this attempt; None: it has to be checked again."""
        record, headers = record_of(scope), Headers(scope=scope)
        held = await self._hold(record, receive, body, opening) if self._tokenizers.must_hold else None
        try:
            if request is None:
                request = await self._checked(record, headers, body, was_held=held is not None)
            ignored = self._ignored(request)
            response_headers = ignored_params(headers, ignored)
            waited = asyncio.get_running_loop().time() - record.started_at
            if record.from_gateway:
                request = with_priority(request, given_priority(headers, request.options.priority))
            traced = record.trace is not None
            messages = generate_messages(request, headers, waited, record.tenant, traced=traced)
            stream = await self._tokenizers.submit(record, messages, request.n, held)
        except NotTaken:
            return False
        finally:
            if held is not None:
                self._tokenizers.requests.held.release(held)
        watcher = asyncio.create_task(_watch_disconnect(receive, stream.fail))
        try:
            await self._accepted(stream, opening)
            response_headers |= ignored_params(headers, (*ignored, *stream.ignored))
            record.response_id = secrets.token_hex(16)
            if request.options.stream:
                response_headers |= usage_header(headers, usage_so_far(stream))
                await opening.open(response_headers | load_header(headers, self._tokenizers.requests.status))
                await _send_stream(record, request, stream, headers, send)
            else:
                choices = await stream.complete()
                whole = await _rendered(request, record, choices)
                response_headers |= _continued_header(choices) | usage_header(
                    headers, usage_of(_ends(stream), stream.n)
                )
                response_headers |= load_header(headers, self._tokenizers.requests.status)
                await Response(whole, 200, response_headers, "application/json")(scope, receive, send)
        except NotTaken:
            return False
        finally:
            watcher.cancel()
            self._tokenizers.release(stream)
        return True

    async def _hold(self, record: RequestRecord, receive: Receive, body: bytes, opening: StreamOpening) -> Held:
        """Wait until the request may be submitted; the caller must release it."""
        seconds = self._config.limits.queue_seconds
        held = self._tokenizers.hold(len(body), record.tenant)
        watcher = asyncio.create_task(_watch_disconnect(receive, held.fail))
        record.is_held, held_at = True, asyncio.get_running_loop().time()
        try:
            await opening.until(held.wait, record.started_at + seconds)
        except BaseException as error:
            self._tokenizers.requests.held.release(held)
            if isinstance(error, TimeoutError):
                reason = self._tokenizers.unavailable_reason() or "other requests are before it"
                message = f"no engine could take the request for {seconds:g} s: {reason}; retry"
                raise ApiError.from_code(ENGINE_UNAVAILABLE, message) from None
            raise
        finally:
            watcher.cancel()
            record.is_held = False
            if record.trace is not None:
                record.trace.add("held", held_at, asyncio.get_running_loop().time())
        return held

    async def _checked(
        self, record: RequestRecord, headers: Headers, body: bytes, *, was_held: bool = False
    ) -> GenerationRequest:
        """Return the request, as far as it can be checked without an engine. Raises ApiError."""
        request = await self._parsed(body)
        record.model = response_model_name(request.model, self._tokenizers.names)
        # A client may prefer that unknown fields are refused.
        ignored_params(headers, self._ignored(request))
        check_task(request, self._tokenizers.model)
        deadline_ms(request, headers)
        check_prompt_lengths(request, self._tokenizers.model)
        seconds = self._config.accept_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._constraints.check(request, was_held=was_held)
        except TimeoutError:
            message = f"no tokenizer worker checked the constraints of the request within {seconds:g} s; retry"
            raise ApiError.from_code(ENGINE_UNAVAILABLE, message) from None
        return request

    async def _parsed(self, body: bytes) -> GenerationRequest:
        model = self._tokenizers.model
        defaults = SamplingDefaults() if model is None else model.defaults
        if len(body) > _LARGE_BODY_BYTES:
            # Streams go on meanwhile.
            return await asyncio.to_thread(self._parse, body, defaults)
        return self._parse(body, defaults)

    def _ignored(self, request: GenerationRequest) -> tuple[str, ...]:
        """Fields that the answer will not honour."""
        return (*request.ignored, *self._outside_vocabulary(request))

    def _outside_vocabulary(self, request: GenerationRequest) -> tuple[str, ...]:
        model = self._tokenizers.model
        return () if model is None else outside_vocabulary(request.params, model.card.vocab_size)

    async def _accepted(self, stream: ResponseStream, opening: StreamOpening) -> None:
        seconds = self._config.accept_seconds
        try:
            await opening.until(stream.accepted, asyncio.get_running_loop().time() + seconds)
        except TimeoutError:
            message = f"the engine did not queue the request within {seconds:g} s"
            raise ApiError.from_code(ENGINE_UNAVAILABLE, message) from None


async def _rendered(request: GenerationRequest, record: RequestRecord, choices: Sequence[Delta]) -> bytes:
    """Return the body of a whole response. Raises ApiError."""
    render = functools.partial(request.format.full, record.response_id, record.model, choices)
    if sum(len(choice.finished.values) for choice in choices if choice.finished is not None) > _LARGE_OUTPUT_BYTES:
        # Other requests go on meanwhile.
        return await asyncio.to_thread(render)
    return render()


async def _send_stream(
    record: RequestRecord, request: GenerationRequest, stream: ResponseStream, headers: Headers, send: Send
) -> None:
    prompt_tokens = [choice.prompt_tokens for choice in stream.choices]
    events = request.format.events(record.response_id, record.model, prompt_tokens)
    fast_path = _fast_path(record.client, events)
    delta_path = _delta_path(record.client, events) if len(stream.choices) == 1 else None
    try:
        await _send_part(send, events.first)
        while stream.has_more:
            deltas = await stream.deltas(fast_path, delta_path)
            if stream.take_continued():
                await _send_part(send, CONTINUED)
            elif not deltas:
                await _send_part(send, events.keepalive)
            await _send_part(send, b"".join([events.event(delta) for delta in deltas]))
    except ApiError as error:
        logger.warning("stream %s ends in an error: %s", record.response_id, error.message)
        await _send_part(send, usage_comment(headers, usage_so_far(stream)) + events.error(error))
        # To return without the last part makes the server drop the connection.
        return
    ends = _ends(stream)
    last = usage_comment(headers, usage_of(ends, stream.n)) + events.last(ends)
    await send({"type": "http.response.body", "body": last, "more_body": False})


def _ends(stream: ResponseStream) -> list[Finished]:
    return [choice.finished for choice in stream.choices if choice.finished is not None]


def _continued_header(choices: Sequence[Delta]) -> dict[str, str]:
    """Return a header with the number of times that answers went on at another engine; none for 0."""
    continued = sum(choice.finished.continued for choice in choices if choice.finished is not None)
    return {"x-minisgl-continued": str(continued)} if continued else {}


def _fast_path(client: ClientConnection | None, events: EventFormat) -> Callable[[str], bool] | None:
    """Return a function that writes a text straight to the connection, if the format allows that."""
    text_event = events.text_event
    if client is None or text_event is None:
        return None
    return functools.partial(client.write, text_event)


def _delta_path(client: ClientConnection | None, events: EventFormat) -> Callable[[Delta], bool] | None:
    """Return a function that does so with output that is more than text. Not for several choices, whose output of a
    step is sent in one piece."""
    return None if client is None else functools.partial(client.write, events.event)


async def _watch_disconnect(receive: Receive, fail: Callable[[ClientDisconnected], None]) -> None:
    """Fail a request when its client disconnects: ASGI reports that only to a task that receives."""
    while (await receive())["type"] != "http.disconnect":
        continue
    fail(ClientDisconnected())


async def _send_part(send: Send, part: bytes) -> None:
    if part:
        await send({"type": "http.response.body", "body": part, "more_body": True})
