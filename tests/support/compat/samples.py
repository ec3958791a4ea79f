"""Samples of messages, made from their types alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from msgspec import inspect

_NUMBERS: Final[tuple[type[inspect.Type], ...]] = (inspect.IntType, inspect.FloatType)


def made_samples(declared: Any) -> dict[str, Any]:
    """For each type of message, plain values with every field set to something else than its default, `TAG/full`, and
    with the required fields only, `TAG/least`. Without a tag the names are `full` and `least`."""
    return {
        f"{struct.tag or ''}/{name}".lstrip("/"): _struct(struct, "", is_full=name == "full")
        for struct in _structs(inspect.type_info(declared))
        for name in ("full", "least")
    }


def _structs(declared: inspect.Type) -> Iterator[inspect.StructType]:
    match declared:
        case inspect.StructType():
            yield declared
        case inspect.UnionType():
            for choice in declared.types:
                yield from _structs(choice)


def _struct(struct: inspect.StructType, path: str, *, is_full: bool) -> Any:
    fields = {
        field.encode_name: _field(field, f"{path}.{field.encode_name}", is_full=is_full)
        for field in struct.fields
        if is_full or field.required
    }
    if struct.array_like:
        return list(fields.values())
    return ({} if struct.tag is None else {struct.tag_field: struct.tag}) | fields


def _field(field: inspect.Field, path: str, *, is_full: bool) -> Any:
    value = _value(field.type, path, is_full=is_full)
    return not field.default if isinstance(field.type, inspect.BoolType) and not field.required else value


def _value(declared: inspect.Type, path: str, *, is_full: bool) -> Any:
    """A value whose texts and numbers tell where it stands, or the least one."""
    match declared:
        case inspect.StructType():
            return _struct(declared, path, is_full=is_full)
        case inspect.UnionType():
            choices = [one for one in declared.types if not isinstance(one, inspect.NoneType)]
            return _value(choices[0], path, is_full=True) if is_full or declared.types == tuple(choices) else None
        case inspect.LiteralType():
            return declared.values[-1]
        case inspect.BoolType():
            return is_full
        case inspect.IntType():
            return 1000 + len(path) if is_full else 0
        case inspect.FloatType():
            return len(path) / 8 if is_full else 0.0
        case inspect.StrType():
            return path if is_full else ""
        case inspect.BytesType():
            return path.encode() if is_full else b""
        case inspect.TupleType():
            return [_value(item, f"{path}[{i}]", is_full=is_full) for i, item in enumerate(declared.item_types)]
        case inspect.ListType() | inspect.VarTupleType():
            return [_value(declared.item_type, f"{path}[]", is_full=is_full)] if is_full else []
        case inspect.DictType():
            of_keys, of_values = declared.key_type, declared.value_type
            key = 7 if isinstance(of_keys, _NUMBERS) else f"{path}-key"
            return {key: _value(of_values, f"{path}{{}}", is_full=is_full)} if is_full else {}
    raise TypeError(f"{path} has the type {declared}: say how a sample of it is made")
