"""From the bytes of a body to a checked struct, or to an error that names the field."""

from __future__ import annotations

import re
from typing import Final, TypeVar

import msgspec

from minisgl.frontend.errors import ApiError

MAX_NAME: Final = 64
"""Characters of a client's field name or value that an error or a header repeats."""

T = TypeVar("T")


def decode(decoder: msgspec.json.Decoder[T], body: bytes | msgspec.Raw) -> T:
    """Raises ApiError."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _of_validation(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, "invalid_json", f"the body is not JSON: {cut(str(error), 200)}") from None
    except RecursionError:
        raise ApiError(400, "invalid_json", "the body is nested too deeply") from None


def invalid(param: str, what: str) -> ApiError:
    return ApiError(400, "invalid_value", f"{param}: {what}", param)


def unsupported(param: str, what: str) -> ApiError:
    return ApiError(400, "unsupported_parameter", f"{param}: {what}", param)


def cut(text: str, limit: int = MAX_NAME) -> str:
    return text if len(text) <= limit else text[:limit] + "…"


def _of_validation(text: str) -> ApiError:
    """From msgspec's words: "Expected `int`, got `str` - at `$.messages[0].role`"."""
    what, _, where = text.partition(" - at `$")
    # A key of an object has no path of its own: "at `key` in `$.logit_bias`", nor has its value: `$.logit_bias[...]`.
    if not where:
        what, _, where = text.partition(" - at `key` in `$")
    path = where.rstrip("`").lstrip(".").partition("[...]")[0]
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", what):
        name = f"{path}.{missing[1]}" if path else missing[1]
        return ApiError(400, "missing_required_parameter", f"the field {name!r} is required", name)
    if not path:
        return ApiError(400, "invalid_value", f"the body: {what[0].lower()}{what[1:]}")
    return invalid(path, what[0].lower() + what[1:])
