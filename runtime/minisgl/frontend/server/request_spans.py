"""The spans of one request, from its record: when it waited, and what engines did for it. Pure.

Engines know nothing of traces. They report for how long a request was queued and its prompt computed; these times end
when its first token arrives here. No span has text of prompts or answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from minisgl.frontend.server.json_body import truncate
from minisgl.frontend.server.request_record import RequestRecord
from minisgl.frontend.server.response_stream import Choice, ResponseStream
from minisgl.frontend.tracing.request_trace import RequestTrace, Span, SpanEvent, Value

_OPERATIONS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages", "/invocations"), "chat"
    ),
    **dict.fromkeys(("/v1/completions", "/generate"), "text_completion"),
    **dict.fromkeys(("/v1/embeddings", "/embed"), "embeddings"),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), "rerank"),
    **dict.fromkeys(("/v1/score", "/score"), "score"),
    **dict.fromkeys(("/v1/classify", "/classify", "/predict"), "classify"),
}
"""Operation by route; the first three are names of OpenTelemetry."""

_MAX_CHOICES: Final = 16
"""Choices with spans of their own: a request may have a thousand."""

_MAX_NAME: Final = 256
"""Characters of a model's name: before a model is known, it is what a client has written."""

REQUEST_ID: Final = "minisgl.request.id"
ENGINE: Final = "minisgl.engine"
CACHED_TOKENS: Final = "minisgl.cached_tokens"
CAUSE: Final = "minisgl.cause"
ERROR_TYPE: Final = "error.type"


def request_spans(record: RequestRecord, trace: RequestTrace, now: float) -> list[Span]:
    """Return the spans of a request that has ended, its own last."""
    events: list[SpanEvent] = []
    if record.stream is not None:
        for choice in record.stream.choices[:_MAX_CHOICES]:
            _add_engine_spans(trace, record.stream, choice, events, now)
    name = f"{record.method} {record.route}"
    attributes = _http_attributes(record) | _model_attributes(record) | trace.attributes
    failed = max(record.status, record.error_status) >= 500
    own = Span(
        name, record.started_at, now, trace.span_id, trace.parent_id, "server", attributes, events, has_failed=failed
    )
    return [*trace.spans, own]


def _http_attributes(record: RequestRecord) -> dict[str, Value]:
    found: dict[str, Value] = {
        "http.request.method": record.method,
        "http.route": record.route,
        REQUEST_ID: record.request_id,
    }
    if record.status:
        found["http.response.status_code"] = record.status
    if record.key_name:
        found["minisgl.tenant"] = record.key_name
    if record.error_code:
        found[ERROR_TYPE] = record.error_code
    elif record.disconnected_in is not None:
        found[ERROR_TYPE] = "client_disconnected"
    if record.error_code or record.disconnected_in is not None:
        found["minisgl.phase"] = record.disconnected_in or record.phase
    return found


def _model_attributes(record: RequestRecord) -> dict[str, Value]:
    """Return attributes by OpenTelemetry's conventions for generative AI."""
    operation = _OPERATIONS.get(record.route)
    if operation is None:
        return {}
    found: dict[str, Value] = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "minisgl"}
    if record.model:
        found["gen_ai.request.model"] = truncate(record.model, _MAX_NAME)
    stream = record.stream
    if stream is None:
        return found
    if stream.n > 1:
        found["gen_ai.request.choice.count"] = stream.n
    if stream.max_tokens is not None and not stream.is_pooled:
        found["gen_ai.request.max_tokens"] = stream.max_tokens
    ends = [choice.finished for choice in stream.choices if choice.finished is not None]
    if not ends:
        return found
    # The choices of a prompt share its tokens.
    prompts = [end for choice in stream.choices[:: stream.n] if (end := choice.finished) is not None]
    found["gen_ai.usage.input_tokens"] = sum(end.prompt_tokens for end in prompts)
    found[CACHED_TOKENS] = sum(end.cached_tokens for end in prompts)
    if not stream.is_pooled:
        found["gen_ai.usage.output_tokens"] = sum(end.completion_tokens for end in ends)
        found["gen_ai.response.finish_reasons"] = [end.reason for end in ends[:_MAX_CHOICES]]
    return found


def _add_engine_spans(
    trace: RequestTrace, stream: ResponseStream, choice: Choice, events: list[SpanEvent], now: float
) -> None:
    """Add `queue`, `prefill` and `decode` of each engine that had the choice."""
    of_choice: dict[str, Value] = {} if len(stream.choices) == 1 else {"minisgl.choice": choice.index}
    if not choice.starts:
        if stream.accepted_at and not choice.first_token_at:
            # Whether an engine had begun with the prompt is not known.
            trace.add("queue", stream.accepted_at, now, of_choice)
        return
    for number, start in enumerate(choice.starts):
        attributes: dict[str, Value] = {ENGINE: start.engine, **of_choice}
        prefilled_at = max(start.at - start.wait.prefill, stream.started_at)
        queued_at = max(prefilled_at - start.wait.queue, stream.started_at)
        if start.cause:
            events.append(SpanEvent("engine_changed", queued_at, {CAUSE: start.cause, **attributes}))
        trace.add("queue", queued_at, prefilled_at, attributes)
        trace.add("prefill", prefilled_at, start.at, attributes)
        if not stream.is_pooled:
            is_last = number + 1 == len(choice.starts)
            end = choice.last_token_at if is_last else choice.starts[number + 1].last_token_at
            trace.add("decode", start.at, max(start.at, end), attributes)
