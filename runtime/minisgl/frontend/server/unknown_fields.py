"""Fields of a body that the API does not know: a response header names them, or, if the client prefers, an error does.

A client that misspells a field, or asks for something that only another server supports, must be able to see it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Final

import msgspec
from msgspec import inspect
from starlette.datastructures import Headers

from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.json_body import MAX_NAME, decode

_MAX_NAMED: Final = 32
_PLAIN_NAME: Final = re.compile(r"[\w.\-]+", re.ASCII)
_STRICT: Final = re.compile(r"(^|[,;])\s*handling\s*=\s*\"?strict\"?\s*($|[,;])", re.IGNORECASE)
"""In the header `Prefer`, RFC 7240 section 4.4."""

_Kinds = tuple[type[msgspec.Struct], ...]
"""Structs that a value may be."""

_object_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list_decoder: Final = msgspec.json.Decoder(list[msgspec.Raw])


def unknown_fields(kind: type[msgspec.Struct], body: bytes) -> tuple[str, ...]:
    """Return the paths, fit for a header, of the fields of a valid body that `kind` and the structs in it do not have.
    Null fields are left out: they ask for nothing. Raises ApiError for names that are not text."""
    return tuple(islice(_unknown((kind,), body, ""), _MAX_NAMED))


def ignored_params(headers: Headers, unknown: Sequence[str]) -> dict[str, str]:
    """Return the response header that names unknown fields. Raises ApiError if the client prefers that:
    `Prefer: handling=strict`."""
    if unknown and _STRICT.search(",".join(headers.getlist("prefer"))):
        raise ApiError(400, "unknown_parameter", f"unknown field {unknown[0]!r}", unknown[0])
    return {"x-ignored-params": ", ".join(unknown)} if unknown else {}


def _unknown(kind: _Kinds, raw: bytes | msgspec.Raw, path: str) -> Iterator[str]:
    known = _fields(kind)
    for name, value in decode(_object_decoder, raw).items():
        if name in known:
            if nested := known[name]:
                yield from _unknown_in(nested, value, path + name)
        elif bytes(value) != b"null":
            yield path + (name[:MAX_NAME] if _PLAIN_NAME.fullmatch(name) else "?")


def _unknown_in(kind: _Kinds, raw: msgspec.Raw, path: str) -> Iterator[str]:
    """Yield the unknown fields in the value of a field that may hold a struct, or a list of structs."""
    match bytes(raw)[:1]:
        case b"{":
            yield from _unknown(kind, raw, f"{path}.")
        case b"[":
            items = decode(_list_decoder, raw)
            for i, item in enumerate(items):
                yield from _unknown_in(kind, item, f"{path}[{i}]")


@lru_cache(maxsize=64)
def _fields(kinds: _Kinds) -> dict[str, _Kinds]:
    """Return every field of structs, with those that its value or an item of it may be."""
    found: dict[str, _Kinds] = {}
    for kind in kinds:
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        found |= {field.encode_name: _structs_in(field.type) for field in info.fields}
        if info.tag_field is not None:
            found[info.tag_field] = ()
    return found


def _structs_in(type_: inspect.Type) -> _Kinds:
    match type_:
        case inspect.StructType():
            return (type_.cls,)
        case inspect.ListType():
            return _structs_in(type_.item_type)
        case inspect.UnionType():
            return tuple(found for member in type_.types for found in _structs_in(member))
        case inspect.Metadata():
            return _structs_in(type_.type)
        case _:
            return ()
