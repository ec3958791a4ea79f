"""`logit_bias`: errors that name the key. The decoder of bodies reports only that some key or value is wrong."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final, TypeVar

import msgspec

from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.json_body import decode, invalid, truncate

MAX_LOGIT_BIAS: Final = 100.0
"""Larger values act like this one, which leaves no other token a chance."""

T = TypeVar("T")

_TOKEN_ID: Final = re.compile("0|[1-9][0-9]*")
_LARGEST: Final = 2**31 - 1
_MAX_KEYS: Final = 4
_MAX_KEY: Final = 32
"""Wrong keys that an error names, and characters of each."""

_object_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def clamped(bias: dict[int, float] | None) -> dict[int, float]:
    return {token: max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, value)) for token, value in (bias or {}).items()}


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes, *path: str) -> T:
    """Decode a body that may have the field `logit_bias`, in the object at `path`. Raises ApiError."""
    try:
        return decode(decoder, body)
    except ApiError as error:
        param = ".".join((*path, "logit_bias"))
        raise (error if error.param != param else _with_key(error, body, *path, "logit_bias")) from None


def _with_key(error: ApiError, body: bytes, *path: str) -> ApiError:
    """Return the error for the wrong entries of the field at `path`, or `error` if no entry is wrong."""
    field = msgspec.Raw(body)
    for name in path:
        field = decode(_object_decoder, field)[name]
    try:
        entries = decode(_object_decoder, field)
    except ApiError:
        # Not an object at all.
        return error
    return _problem(entries.items(), ".".join(path)) or error


def _problem(entries: Collection[tuple[str, msgspec.Raw]], param: str) -> ApiError | None:
    wrong = [key for key, _ in entries if not _TOKEN_ID.fullmatch(key) or int(key[:11]) > _LARGEST]
    if wrong:
        names = ", ".join(repr(truncate(key, _MAX_KEY)) for key in wrong[:_MAX_KEYS])
        more = f" and {len(wrong) - _MAX_KEYS} more" if len(wrong) > _MAX_KEYS else ""
        return invalid(param, f"{names}{more}: not token ids; use ids such as /tokenize returns")
    for key, value in entries:
        text = bytes(value).decode("utf-8", "replace")
        if text[:1] not in "-0123456789":
            return invalid(param, f"the bias of token {key} is {truncate(text)}; use a number from -100 to 100")
    return None
