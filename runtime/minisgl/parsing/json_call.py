"""Tool calls as JSON objects: `{"name": …, "arguments": {…}}`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from minisgl.parsing import json_text
from minisgl.parsing.call_sequence import parse_calls, parse_list
from minisgl.parsing.json_text import SPACE
from minisgl.parsing.output import Call, Output
from minisgl.parsing.reader import Ended, NotACall, Reader, Scan
from minisgl.parsing.tool_format import Tools

_ARGUMENTS: Final = ("arguments", "parameters")
_NONE: Final = (["null"], ["None"])
_OTHER_KEYS: Final = ("type", "id", "function")
"""Further keys that models write into calls."""
KEYS: Final = ("name", *_ARGUMENTS, *_OTHER_KEYS)
"""All keys of an object that counts as a call where nothing else marks it."""


def parse(reader: Reader, output: Output, known: Collection[str] | None = None) -> Scan[None]:
    """Parse the call whose object begins at the position. If it is broken behind its name, the rest remains text.
    Raises NotACall if it is none, and Ended.

    `known`: names of tools. With it, an object counts as a call only if it has a known name and no other keys than a
    call: nothing else tells it from an object that the client has asked for.
    """
    call = Call(output)
    try:
        yield from _object(reader, call, known)
    except NotACall:
        if not call.has_begun:
            raise
        reader.at = 0
    call.end()


def parse_arguments(reader: Reader, output: Output, name: str) -> Scan[None]:
    """Parse the arguments of a call whose name has been read. If they are broken, the rest remains text. Raises
    Ended."""
    call = Call(output)
    call.begin(name)
    reader.commit()

    def emit(text: str) -> None:
        call.arguments(text)
        reader.commit()

    try:
        yield from reader.skip(SPACE)
        yield from arguments(reader, emit)
    except NotACall:
        reader.at = 0
    call.end()


def parse_several(reader: Reader, output: Output, tools: Tools, between: str) -> Scan[None]:
    """Parse calls behind a marker, which are separated by any of the characters `between`; or a list of calls. Raises
    NotACall and Ended as `parse`. Only the first one certainly is a call: nothing marks their end."""
    if (yield from reader.skip(SPACE)) == "[":
        reader.at += 1
        yield from parse_list(reader, output, lambda: _listed(reader, output))
        return
    known = iter((None, tools))
    yield from parse_calls(
        reader,
        output,
        call=lambda: parse(reader, output, next(known, tools)),
        follows=lambda: reader.skip_to(("{",), between),
    )


def _listed(reader: Reader, output: Output) -> Scan[None]:
    yield from reader.skip(SPACE)
    yield from parse(reader, output)


def check_name(reader: Reader, known: Collection[str]) -> Scan[None]:
    """Raise NotACall unless the object at the position begins with the name of a known tool."""
    yield from reader.expect("{")
    if (yield from _key(reader)) != "name" or (yield from json_text.string(reader)) not in known:
        raise NotACall


def _object(reader: Reader, call: Call, known: Collection[str] | None) -> Scan[None]:
    """Parse a call. Raises NotACall, also where it is broken behind its name, and Ended."""
    yield from reader.expect("{")
    held: list[str] = []
    """Arguments before the name."""
    has_arguments = False

    def emit(text: str) -> None:
        call.arguments(text)
        reader.commit()

    while True:
        key = yield from _key(reader)
        if key == "name" and not call.has_begun:
            name = yield from json_text.string(reader)
            if not name or (known is not None and name not in known):
                raise NotACall
            call.begin(name)
            emit("".join(held))
        elif key in _ARGUMENTS and not has_arguments:
            take = emit if call.has_begun else held.append
            try:
                yield from arguments(reader, take)
            except NotACall:
                if call.is_empty and (yield from reader.peek()) != "}":
                    # There are arguments, but none that can be read: the call must not seem to have none.
                    reader.at += 1
                    take(reader.text[reader.at - 1])
                raise
            # A null may precede them under the other name.
            has_arguments = not call.is_empty or bool(held)
        elif known is None or key in _OTHER_KEYS:
            yield from json_text.value(reader, _ignore)
        else:
            raise NotACall
        following = yield from reader.skip(SPACE)
        if following == ",":
            reader.at += 1
            yield from reader.skip(SPACE)
        elif following != "}" and (has_arguments or following not in "\"'"):
            # A missing comma before the arguments must not cost them.
            raise NotACall
        if (yield from reader.peek()) == "}":
            break
    reader.at += 1
    if not call.has_begun:
        raise NotACall


def arguments(reader: Reader, emit: Callable[[str], None]) -> Scan[None]:
    """Pass the arguments at the position to `emit`, as they arrive. Some models write them as a string that contains
    JSON, or null for none. Raises NotACall, Ended."""
    repair = json_text.Repair()

    def take(text: str) -> None:
        emit(repair.push(text))

    first = yield from reader.peek()
    try:
        if first in "\"'":
            yield from json_text.string_value(reader, take)
        elif first in "{[":
            yield from json_text.value(reader, take)
        else:
            scalar: list[str] = []
            try:
                yield from json_text.value(reader, scalar.append)
            except Ended:
                if scalar not in _NONE:
                    raise
                reader.at = len(reader.text)
            finally:
                if scalar not in _NONE:
                    take("".join(scalar))
    finally:
        if rest := repair.finish():
            emit(rest)


def _key(reader: Reader) -> Scan[str]:
    yield from reader.skip(SPACE)
    key = yield from json_text.string(reader)
    yield from reader.skip(SPACE)
    yield from reader.expect(":")
    yield from reader.skip(SPACE)
    return key


def _ignore(text: str) -> None:
    """Other values of a call have no meaning for clients."""
