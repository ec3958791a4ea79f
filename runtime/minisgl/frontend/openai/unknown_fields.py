"""Fields of a body that nobody here knows: an answer's header names them, and who prefers it gets an error instead.

A client that misspells a field, or asks for something that only another server has, must be able to see it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

import msgspec
from msgspec import inspect
from starlette.datastructures import Headers

from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.json_body import MAX_NAME, decode

_MOST_NAMED: Final = 32
_PLAIN_NAME: Final = re.compile(r"[\w.\-]+", re.ASCII)
_STRICT: Final = re.compile(r"(^|[,;])\s*handling\s*=\s*\"?strict\"?\s*($|[,;])", re.IGNORECASE)
"""In the header `Prefer`, RFC 7240 section 4.4."""

_object_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list_decoder: Final = msgspec.json.Decoder(list[msgspec.Raw])


def unknown_fields(kind: type[msgspec.Struct], body: bytes) -> tuple[str, ...]:
    """Paths, fit for a header, of the fields of a valid body that `kind` and the structs in it do not have. Those
    that are null ask for nothing. Raises ApiError for names that are no text."""
    found = []
    for path in _unknown(kind, body, ""):
        found.append(path)
        if len(found) == _MOST_NAMED:
            break
    return tuple(found)


def refuse_if_strict(headers: Headers, unknown: Sequence[str]) -> None:
    """Raises ApiError where the client wants unknown fields to be errors: `Prefer: handling=strict`."""
    if unknown and _STRICT.search(",".join(headers.getlist("prefer"))):
        raise ApiError(400, "unknown_parameter", f"{unknown[0]}: there is no such field here", unknown[0])


def _unknown(kind: type[msgspec.Struct], raw: bytes | msgspec.Raw, path: str) -> Iterator[str]:
    known = _structs_below(kind)
    for name, value in decode(_object_decoder, raw).items():
        if name in known:
            if (inner := known[name]) is not None:
                yield from _unknown_in(inner, value, path + name)
        elif bytes(value) != b"null":
            yield path + (name[:MAX_NAME] if _PLAIN_NAME.fullmatch(name) else "?")


def _unknown_in(kind: type[msgspec.Struct], raw: msgspec.Raw, path: str) -> Iterator[str]:
    """In the value of a field that may hold a struct, or a list of them."""
    match bytes(raw)[:1]:
        case b"{":
            yield from _unknown(kind, raw, f"{path}.")
        case b"[":
            items = decode(_list_decoder, raw)
            for i, one in enumerate(items):
                yield from _unknown(kind, one, f"{path}[{i}].")


@lru_cache(maxsize=64)
def _structs_below(kind: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct] | None]:
    """Every field, with the struct that it or an item of it may be."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return {field.encode_name: _struct_in(field.type) for field in info.fields}


def _struct_in(type_: inspect.Type) -> type[msgspec.Struct] | None:
    match type_:
        case inspect.StructType():
            return type_.cls
        case inspect.ListType():
            return _struct_in(type_.item_type)
        case inspect.UnionType():
            return next((found for one in type_.types if (found := _struct_in(one)) is not None), None)
        case inspect.Metadata():
            return _struct_in(type_.type)
        case _:
            return None
