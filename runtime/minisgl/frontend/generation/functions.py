"""Functions that a model may call, and its calls in a conversation, as chat templates expect them: for all APIs."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

import msgspec

from minisgl.frontend.server.json_body import check_fits, fits_message, invalid, missing

MAX_FUNCTIONS: Final = 128
MAX_DEFINITION_BYTES: Final = 256 << 10
"""JSON text of one definition."""
FUNCTION_NAME: Final = r"^[a-zA-Z0-9_.-]{1,128}$(?!\n)"

_name: Final = re.compile(FUNCTION_NAME)
_FIELDS: Final[tuple[tuple[str, type, str], ...]] = (
    ("description", str, "a string"),
    ("parameters", dict, "a JSON schema, which is an object"),
    ("strict", bool, "a boolean"),
)


def function_definition(function: dict[str, Any], path: str, parameters: str = "parameters") -> dict[str, Any]:
    """Return the definition for the chat template of a function with `name` and, if it has them, `description`,
    `parameters` and `strict`. `path` comes before the names of fields in errors, and `parameters` is the client's name
    of that field. Raises ApiError."""
    if "name" not in function:
        raise missing(f"{path}.name")
    check_name(function["name"], path)
    for field, kind, expected in _FIELDS:
        if field in function and not isinstance(function[field], kind):
            raise invalid(f"{path}.{parameters if field == 'parameters' else field}", f"expected {expected}")
    if function.get("parameters", {}).get("type", "object") != "object":
        raise invalid(f"{path}.{parameters}.type", 'expected "object": the arguments of a call are a JSON object')
    check_fits(function, path)
    if len(msgspec.json.encode(function)) > MAX_DEFINITION_BYTES:
        raise invalid(path, f"expected at most {MAX_DEFINITION_BYTES >> 10} KiB")
    return {"type": "function", "function": function}


def check_name(name: Any, path: str) -> None:
    """Check the name of a function, or of a namespace with which such names begin. Raises ApiError."""
    if not isinstance(name, str) or _name.search(name) is None:
        raise invalid(f"{path}.name", "expected 1 to 128 letters, digits, `_`, `-` and `.`")


def are_complete(arguments: str) -> bool:
    """Return whether the arguments of a call are whole, which they are not where a stop string cut the call off."""
    return _decoded(arguments) is not None


def are_object(arguments: str) -> bool:
    """Return whether the arguments of a call are the JSON text of an object, as strict readers take it."""
    decoded = _decoded(arguments)
    return decoded is not None and isinstance(decoded.value, dict)


def call_arguments(arguments: str) -> Any:
    """Return the object that the JSON text of a call's arguments holds, as templates expect it. Arguments that are no
    JSON object, or one that no message can carry, stay text."""
    if not arguments.strip():
        return {}
    decoded = _decoded(arguments)
    fits = decoded is not None and isinstance(decoded.value, dict) and fits_message(decoded.value)
    return decoded.value if decoded is not None and fits else arguments


class _Decoded(NamedTuple):
    value: Any


def _decoded(text: str) -> _Decoded | None:
    """Return the value of a JSON text; None if it is none."""
    try:
        return _Decoded(msgspec.json.decode(text))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
