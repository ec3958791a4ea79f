"""The access log: one line for each request at its end, without any text of prompts and responses."""

from __future__ import annotations

import logging
from typing import Final

from minisgl.frontend.server.json_body import truncate
from minisgl.frontend.server.request_record import RequestRecord
from minisgl.frontend.server.response_stream import ResponseStream
from minisgl.frontend.server.web_pages import PAGE_FILES

# A documented name, which log pipelines select by. It does not follow the module.
logger = logging.getLogger("minisgl.frontend.access_log")

NOT_LOGGED: Final = frozenset({"/health", "/ping", "/ready", "/metrics", *PAGE_FILES})
"""Paths that machines request several times a second, and files that a browser loads with a page."""

_MAX_LENGTH: Final = 256
"""Characters of a path, or of a model's name."""


def write(record: RequestRecord, now: float) -> None:
    if record.path in NOT_LOGGED:
        return
    fields: dict[str, str | int | float] = {
        "request_id": record.request_id,
        "method": record.method,
        "path": _printable(record.path),
        "status": record.status,
        "total_ms": _ms(now - record.started_at),
        **record.headers,
    }
    if record.key_name:
        fields["key"] = record.key_name
    if record.model:
        fields["model"] = _printable(record.model)
    if record.stream is not None:
        fields |= _generation_fields(record.stream)
    message = "answered"
    if record.disconnected_in is not None:
        message = "aborted: the client left"
        fields["phase"] = record.disconnected_in
    elif record.error_code:
        message = "failed"
        fields["code"] = record.error_code
        fields["phase"] = record.phase
    logger.info(message, extra=fields)


def _generation_fields(stream: ResponseStream) -> dict[str, str | int | float]:
    fields: dict[str, str | int | float] = {}
    ends = [choice.finished for choice in stream.choices if choice.finished is not None]
    if stream.accepted_at:
        fields["accepted_ms"] = _ms(stream.accepted_at - stream.started_at)
    if waits := [end.wait.queue for end in ends if end.wait is not None]:
        fields["queue_ms"] = _ms(max(waits))
    if stream.first_token_at:
        fields["first_token_ms"] = _ms(stream.first_token_at - stream.started_at)
    if ends:
        fields |= {
            "prompt_tokens": sum(end.prompt_tokens for end in ends),
            "cached_tokens": sum(end.cached_tokens for end in ends),
            "completion_tokens": sum(end.completion_tokens for end in ends),
            "finish_reason": ",".join(sorted({end.reason for end in ends})),
        }
    return fields


def _printable(text: str) -> str:
    """Make text of a client safe to log: it can neither end the line, nor steer a terminal, nor fill a disk."""
    text = truncate(text, _MAX_LENGTH)
    return text if text.isprintable() else ascii(text)[1:-1]


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
