"""One line for each request at its end; without a word of prompts and answers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from minisgl.frontend.server.json_body import cut

if TYPE_CHECKING:
    from minisgl.frontend.server.traffic import RequestRecord

logger = logging.getLogger(__name__)

NOT_LOGGED: Final = frozenset({"/health", "/ready", "/metrics"})
"""Asked for several times a second by machines."""

LOGGED_HEADERS: Final = {"x-stainless-retry-count": "retry", "traceparent": "trace"}
"""Request header → field."""

_LONGEST: Final = 256
"""Characters of a path, or of a model's name."""


def write(record: RequestRecord, now: float) -> None:
    if record.path in NOT_LOGGED:
        return
    fields: dict[str, str | int | float] = {
        "request_id": record.request_id,
        "method": record.method,
        "path": _plain(record.path),
        "status": record.status,
        "total_ms": _ms(now - record.began),
        **record.headers,
    }
    if record.key:
        fields["key"] = record.key
    if record.model:
        fields["model"] = _plain(record.model)
    if record.accepted_at:
        fields["accepted_ms"] = _ms(record.accepted_at - record.began)
    if record.queue_seconds is not None:
        fields["queue_ms"] = _ms(record.queue_seconds)
    if record.first_at:
        fields["first_token_ms"] = _ms(record.first_at - record.began)
    if record.finish_reasons:
        fields |= {
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "completion_tokens": record.completion_tokens,
            "finish_reason": ",".join(sorted(set(record.finish_reasons))),
        }
    message = "answered"
    if record.gone_in is not None:
        message = "aborted: the client left"
        fields["phase"] = record.gone_in
    elif record.error_code:
        message = "failed"
        fields["code"] = record.error_code
        fields["phase"] = record.phase
    logger.info(message, extra=fields)


def _plain(text: str) -> str:
    """What a client wrote, so that it can neither end the line, nor steer a terminal, nor fill a disk."""
    text = cut(text, _LONGEST)
    return text if text.isprintable() else ascii(text)[1:-1]


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
