"""Families of messages with their encoding, field by field as plain values.

Nothing here imports the product: the same code describes the messages of this tree and, in another process, those of an
earlier version. Names of Python classes and attributes do not appear in values or schemas, only what is encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import inspect


@dataclass(frozen=True)
class Family:
    """All messages that one reader takes.

    declared: their type.
    encode: a message from plain values, of which those with a default may be left out, to the bytes that are sent.
    decode: the bytes to plain values, with every field.
    schema: path of each message type and field → its type and default.
    """

    declared: Any
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
    schema: Mapping[str, str]


def typed(
    declared: Any,
    read: Callable[[bytes], Any],
    write: Callable[[Any], bytes],
    form: Literal["json", "msgpack"],
    known: Collection[str] | None = None,
) -> Family:
    """A family whose messages are structs of the type `declared`. Decoded values have only the fields with the paths
    `known`; None: all."""
    pack = msgspec.json.encode if form == "json" else msgspec.msgpack.encode
    return Family(
        declared=declared,
        encode=lambda values: write(read(pack(values))),
        decode=lambda frame: plain(read(frame), known),
        schema=schema(declared),
    )


def plain(value: Any, known: Collection[str] | None = None, path: str = "") -> Any:
    """Structs as dicts by encoded names, with every field, or as lists where they are encoded so; JSON kept raw as what
    it says."""
    match value:
        case msgspec.Struct():
            config = value.__struct_config__
            path = path or _tag(config.tag)
            found = [
                (name, plain(part, known, below))
                for name, part, below in _parts(value, path, config.array_like)
                if known is None or below in known
            ]
            if config.array_like:
                return [part for _, part in found]
            return ({} if config.tag is None else {config.tag_field: config.tag}) | dict(found)
        case msgspec.Raw():
            return msgspec.json.decode(value)
        case list() | tuple():
            return [plain(part, known, f"{path}[]") for part in value]
        case dict():
            return {key: plain(part, known, f"{path}{{}}") for key, part in value.items()}
    return value


def schema(declared: Any) -> dict[str, str]:
    """Path → type and default of every field, and an entry for each tagged type of message."""
    found = inspect.type_info(declared)
    return dict(_described(found, ""))


def _described(found: inspect.Type, path: str) -> Iterator[tuple[str, str]]:
    match found:
        case inspect.StructType():
            if not path and found.tag is not None:
                path = _tag(found.tag)
                yield path, f"{found.tag_field}={found.tag!r}"
            for index, part in enumerate(found.fields):
                below = f"{path}[{index}]" if found.array_like else f"{path}.{part.encode_name}"
                yield below, _type_text(part.type) + _default_text(part)
                yield from _described(part.type, below)
        case inspect.UnionType():
            for choice in found.types:
                yield from _described(choice, path)
        case inspect.ListType() | inspect.VarTupleType():
            yield from _described(found.item_type, f"{path}[]")
        case inspect.TupleType():
            for item in found.item_types:
                yield from _described(item, f"{path}[]")
        case inspect.DictType():
            yield from _described(found.value_type, f"{path}{{}}")


def _type_text(found: inspect.Type) -> str:
    match found:
        case inspect.StructType():
            return "array" if found.array_like else "object"
        case inspect.UnionType():
            return " | ".join(sorted(map(_type_text, found.types)))
        case inspect.LiteralType():
            return " | ".join(map(repr, found.values))
        case inspect.ListType() | inspect.VarTupleType():
            text = f"[{_type_text(found.item_type)}]"
        case inspect.TupleType():
            return f"({', '.join(map(_type_text, found.item_types))})"
        case inspect.DictType():
            text = f"{{{_type_text(found.key_type)}: {_type_text(found.value_type)}}}"
        case _:
            text = type(found).__name__.removesuffix("Type").lower()
    limits = {
        name: limit
        for name in ("gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length", "pattern")
        if (limit := getattr(found, name, None)) is not None
    }
    return text + "".join(f" {name}={limit}" for name, limit in limits.items())


def _default_text(part: inspect.Field) -> str:
    if part.required:
        return ", required"
    default = part.default if part.default_factory is msgspec.NODEFAULT else part.default_factory()
    return ", its defaults" if isinstance(default, msgspec.Struct) else f", {default!r}"


def _parts(value: msgspec.Struct, path: str, array_like: bool) -> Iterator[tuple[str, Any, str]]:
    """Encoded name, value and path of each field."""
    names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
    for index, (encoded, name) in enumerate(names):
        yield encoded, getattr(value, name), f"{path}[{index}]" if array_like else f"{path}.{encoded}"


def _tag(tag: Any) -> str:
    return "" if tag is None else str(tag)
