"""JSON of server-sent events."""

from __future__ import annotations

from typing import Any, Final

import msgspec

_encode: Final = msgspec.json.encode
_SEPARATORS: Final = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def event_json(value: Any) -> bytes:
    """Encode a value. Unicode's line separators are escaped: some HTTP clients, such as httpx with `iter_lines`, end a
    line at them, and would lose the rest of an event."""
    data = _encode(value)
    if b"\xe2\x80" in data or b"\xc2\x85" in data:
        for separator, escaped in _SEPARATORS:
            data = data.replace(separator, escaped)
    return data


LOWEST: Final = -9999.0
"""Stands for minus infinity, which JSON does not have, as in OpenAI's API: a token that cannot be sampled."""


def finite(logprob: float | None) -> float | None:
    """Return the value, at least LOWEST; None for the first token of a prompt, which has none."""
    return None if logprob is None else max(logprob, LOWEST)
