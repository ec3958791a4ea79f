"""Request bodies: read within limits, decoded to a validated struct, or to an error that names the field."""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from minisgl.frontend.errors import ApiError, ClientDisconnected
from minisgl.frontend.server.client_connection import body_error

MAX_NAME: Final = 64
"""Characters of a client's field name or value that an error or a header repeats."""

T = TypeVar("T")


async def read_json_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Return the body, of up to `limit` bytes. Raises ApiError when it is longer, compressed, declared as something
    else than JSON, or sent in broken HTTP, and ClientDisconnected."""
    headers = Headers(scope=scope)
    media_type = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    # What `curl -d` sends unless it is told otherwise. A page of another site sends its origin along.
    is_form = media_type == "application/x-www-form-urlencoded" and "origin" not in headers
    if media_type != "application/json" and not media_type.endswith("+json") and not is_form:
        raise ApiError(415, "unsupported_media_type", "the body must be JSON; set `Content-Type: application/json`")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "unsupported_media_type", "bodies are not decompressed; send without `Content-Encoding`")
    length = headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        if (error := body_error(scope)) is not None:
            raise error
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > limit:
            raise _too_large(limit)
        more = message.get("more_body", False)
    return b"".join(chunks)


def decode(decoder: msgspec.json.Decoder[T], body: bytes | msgspec.Raw) -> T:
    """Raises ApiError."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _from_validation(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, "invalid_json", f"the body is not valid JSON: {truncate(str(error), 200)}") from None
    except RecursionError:
        raise ApiError(400, "invalid_json", "the body is nested too deeply") from None


def invalid(param: str, problem: str) -> ApiError:
    return ApiError(400, "invalid_value", f"{param}: {problem}", param)


def missing(param: str) -> ApiError:
    return ApiError(400, "missing_required_parameter", f"missing required field {param!r}", param)


def unsupported(param: str, problem: str) -> ApiError:
    return ApiError(400, "unsupported_parameter", f"{param}: {problem}", param)


def truncate(text: str, limit: int = MAX_NAME) -> str:
    return text if len(text) <= limit else text[:limit] + "…"


def _too_large(limit: int) -> ApiError:
    # The rest of the body is not read, so the connection cannot be used again.
    message = f"the body exceeds {limit} bytes; shorten it"
    return ApiError(413, "body_too_large", message, headers={"connection": "close"})


def _from_validation(text: str) -> ApiError:
    """Make the error for a message of msgspec: "Expected `int`, got `str` - at `$.messages[0].role`"."""
    problem, _, where = text.partition(" - at `$")
    # A key of an object has no path of its own: "at `key` in `$.logit_bias`", nor has its value: `$.logit_bias[...]`.
    if not where:
        problem, _, where = text.partition(" - at `key` in `$")
    path = where.rstrip("`").lstrip(".").partition("[...]")[0]
    if absent := re.fullmatch(r"Object missing required field `(\w+)`", problem):
        name = f"{path}.{absent[1]}" if path else absent[1]
        return missing(name)
    problem = problem[0].lower() + problem[1:]
    return invalid(path, problem) if path else ApiError(400, "invalid_value", f"the body: {problem}")


MAX_DEPTH: Final = 64
"""Nesting of objects and lists."""


def fits_message(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Return whether a message can carry the value: not nested deeper than `depth`, integers of up to 64 bits."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(fits_message(item, depth - 1) for item in inner)
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def check_fits(value: Any, param: str) -> None:
    """Raises ApiError for a value that no message can carry."""
    if not fits_message(value):
        raise invalid(param, f"expected at most {MAX_DEPTH} levels of nesting and integers of at most 64 bits")
