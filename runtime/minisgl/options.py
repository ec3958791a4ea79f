"""Options: fields of configuration structs that users set by flag, environment variable, file or keyword.

Such a field is declared as `Annotated[type, option("help text", ...)]`. Name, type, range, default and help text of the
option are those of the field and are stated nowhere else.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_origin

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
Index = Annotated[int, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(gt=0, extra={"metavar": "S"})]
Milliseconds = Annotated[float, Meta(ge=0, extra={"metavar": "MS"})]
Port = Annotated[int, Meta(ge=0, le=65535)]
"""TCP port; 0: a free one."""

_METAVARS: Final[Mapping[Any, str]] = {int: "N", float: "X", Path: "FILE"}

_TYPING_ERROR: Final = 0.6
"""Similarity from which on a name is taken for another one with a typing error, from 0 to 1."""


class Option(NamedTuple):
    """One option of a struct."""

    field: str
    """Name of the struct's field."""
    name: str
    """Name for users, with underscores: the encoded name of the field."""
    type: Any
    """Type without `Annotated` and None; that of one value of a tuple of fixed length."""
    length: int | None
    """Number of values of a tuple of fixed length; None for other types."""
    bounds: Meta
    """`ge`, `gt` and `le` of a number."""
    default: Any
    help: str
    metavar: str

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed values of a Literal in the order of their declaration; empty for other types."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()


def option(description: str, *, default: str = "{}", metavar: str = "") -> Meta:
    """Mark a field as an option. `description` is its help text.

    `default` describes the default in the help, with `{}` for the value: it adds a unit, or the meaning of None.
    `metavar` stands for the value in the help; empty: by type, such as N for an integer and S for seconds. That of a
    tuple of fixed length has one word for each value.
    """
    return Meta(description=description, extra={"default": default, "metavar": metavar})


def options_of(defaults: msgspec.Struct) -> list[Option]:
    """Options of a struct in the order of its fields; their defaults are the values of `defaults`."""
    found = []
    for field in msgspec.structs.fields(defaults):
        kind, metas = _plain(field.type)
        default = getattr(defaults, field.name)
        length = None
        if get_origin(kind) is tuple and Ellipsis not in get_args(kind):
            length = len(get_args(kind))
            kind, value_metas = _plain(get_args(kind)[0])
            metas = [*value_metas, *metas]
        bounds = next((meta for meta in metas if meta.description is None), Meta())
        for meta in metas:
            if meta.description is not None and meta.extra is not None:
                shown = meta.extra["default"].format("off" if isinstance(default, bool) else default)
                text = f"{meta.description} (default: {shown})"
                metavar = meta.extra["metavar"] or (bounds.extra or {}).get("metavar", _METAVARS.get(kind, "NAME"))
                found.append(Option(field.name, field.encode_name, kind, length, bounds, default, text, metavar))
    return found


def closest(name: str, known: Iterable[str]) -> str:
    """The known name that is most similar to `name`, for errors about unknown names. One that begins with it comes
    before all others, because `name` is then a part of it."""
    names = list(known)
    longer = [each for each in names if each.startswith(name)]
    return difflib.get_close_matches(name, longer or names, 1, 0.0)[0]


def close(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar to `name`, if it is similar enough to be a typing error. Leading dashes do
    not count: they would make all short flags similar."""
    names = {each.lstrip("-"): each for each in known}
    found = difflib.get_close_matches(name.lstrip("-"), names, 1, _TYPING_ERROR)
    return names[found[0]] if found else None


def _plain(kind: Any) -> tuple[Any, list[Meta]]:
    """A type without `Annotated` and None, and the annotations that were removed."""
    metas: list[Meta] = []
    while True:
        if get_origin(kind) is Annotated:
            kind, *found = get_args(kind)
            metas += found
        elif NoneType in get_args(kind):
            kind = get_args(kind)[0]
        else:
            return kind, metas
