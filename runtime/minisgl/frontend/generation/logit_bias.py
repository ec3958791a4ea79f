"""`logit_bias`: errors that name the key. The decoder of bodies reports only that some key or value is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, TypeVar

import msgspec

from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.json_body import decode, invalid, truncate

MAX_LOGIT_BIAS: Final = 100.0
"""Larger values act like this one, which leaves no other token a chance."""

T = TypeVar("T")

_TOKEN_ID: Final = re.compile("0|[1-9][0-9]*")
_LARGEST: Final = 2**31 - 1

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
    """Return the error for the first wrong entry of the field at `path`, or `error` if no entry is wrong."""
    field = msgspec.Raw(body)
    for name in path:
        field = decode(_object_decoder, field)[name]
    try:
        entries = decode(_object_decoder, field)
    except ApiError:
        # Not an object at all.
        return error
    return _first_problem(entries.items(), ".".join(path)) or error


def _first_problem(entries: Iterable[tuple[str, msgspec.Raw]], param: str) -> ApiError | None:
    for key, value in entries:
        if not _TOKEN_ID.fullmatch(key) or int(key[:11]) > _LARGEST:
            return invalid(param, f"key {truncate(key)!r} is not a token id; use ids such as /tokenize returns")
        text = bytes(value).decode("utf-8", "replace")
        if text[:1] not in "-0123456789":
            return invalid(param, f"the bias of token {key} is {truncate(text)}; use a number from -100 to 100")
    return None
