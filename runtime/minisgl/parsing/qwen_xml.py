"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`.

Values are texts without quotes; the tool's schema decides which of them are strings. A string is passed on as it
arrives; any other value when it is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from minisgl.parsing import json_call
from minisgl.parsing.call_sequence import parse_calls
from minisgl.parsing.json_text import SPACE, escaped
from minisgl.parsing.output import Call, Output
from minisgl.parsing.parameter_types import has_type, parameter_types, same
from minisgl.parsing.python_text import json_value, python_literal
from minisgl.parsing.reader import Ended, NotACall, Reader, Scan, held_suffix
from minisgl.parsing.tool_format import ToolFormat, Tools

START: Final = "<tool_call>"
END: Final = "</tool_call>"
FUNCTION: Final = "<function="
END_FUNCTION: Final = "</function>"
PARAMETER: Final = "<parameter="
END_PARAMETER: Final = "</parameter>"
_NAME: Final = re.compile(r"[^<>\s]*")
_KEY: Final = re.compile(r"[^<>\n]*")
_BLANKS: Final = r"[ \t\r\n]*"
_FOLLOWS: Final = f"{PARAMETER}|{END_FUNCTION}|{END}{_BLANKS}{START}"
"""What follows the tag that ends a value; before anything else, the tag is part of the value."""
_UNTAGGED_END: Final = f"\n(?={PARAMETER}|{END_FUNCTION}\n{END})"
"""The end of a value where a model forgets the tag."""
_VALUE_END: Final = re.compile(rf"\n?{END_PARAMETER}(?={_BLANKS}(?:{_FOLLOWS}))|{_UNTAGGED_END}")
_LAST_VALUE_END: Final = re.compile(
    rf"\n?{END_PARAMETER}(?={_BLANKS}(?:{_FOLLOWS}|(?:{END}{_BLANKS})?\Z))|{_UNTAGGED_END}"
)
"""The same in the whole text of an answer."""


def _beginnings(text: str) -> str:
    """Return a pattern for any beginning of a text, also the empty one and the whole text."""
    return "".join(f"(?:{re.escape(character)}" for character in text) + ")?" * len(text)


_UNDECIDED_END: Final = re.compile(
    rf"\n?{END_PARAMETER}(?={_BLANKS}(?:{_beginnings(PARAMETER)}|{_beginnings(END_FUNCTION)}|{_beginnings(END)}"
    rf"|{END}{_BLANKS}{_beginnings(START)})\Z)"
)
"""A tag at the end of what has arrived: what follows decides whether it ends the value."""
_UNTAGGED_ENDS: Final = (f"\n{PARAMETER}", f"\n{END_FUNCTION}\n{END}")
_VALUE_ENDS: Final = (END_PARAMETER, f"\n{END_PARAMETER}", *_UNTAGGED_ENDS)
"""Texts whose beginning, at the end of what has arrived, may be that of a value's end."""
FREE_TEXT: Final = "/(?s:.*)/ & ~/(?s:.*({}).*)/".format(
    "|".join(
        end.replace("\n", r"\n").replace("/", r"\/")
        for end in (f"{END_PARAMETER}{_BLANKS}({_FOLLOWS})", *_UNTAGGED_ENDS)
    )
)
"""A terminal of grammars for texts without an end."""
_STRING_SYNTAX: Final = re.compile(r'\\.?|"', re.DOTALL)
_NUMBER: Final = re.compile(r"-?[0-9]*(\.[0-9]*)?([eE][+\-]?[0-9]*)?")
_SHORT_VALUE: Final = 64
_LITERALS: Final[Mapping[str, tuple[str, ...]]] = {"boolean": ("true", "false"), "null": ("null", "none")}


def _parse(reader: Reader, output: Output, tools: Tools) -> Scan[None]:
    is_marked = False
    while (yield from reader.skip_text(START)):
        is_marked = True
        yield from reader.skip(SPACE)
    yield from parse_calls(
        reader,
        output,
        # Without the marker, only the name tells a call from a text about such calls.
        call=lambda: _call(reader, output, tools, is_any=is_marked),
        follows=lambda: reader.skip_to((FUNCTION,), SPACE),
    )
    yield from reader.skip_ends(END, SPACE)


def _call(reader: Reader, output: Output, tools: Tools, *, is_any: bool) -> Scan[None]:
    """`is_any`: a tool that is not known may be called, too."""
    name = yield from _tag(reader, FUNCTION, _NAME)
    if not is_any and name not in tools:
        raise NotACall
    call = Call(output)
    call.begin(name)
    reader.commit()
    yield from _parameters(reader, call, tools.get(name, {}))


def _tag(reader: Reader, begin: str, pattern: re.Pattern[str]) -> Scan[str]:
    """Return the name in a tag such as `<function=NAME>`. Raises NotACall, Ended."""
    if not (yield from reader.skip_text(begin)):
        raise NotACall
    name = (yield from reader.match(pattern)).strip()
    yield from reader.expect(">")
    if not name:
        raise NotACall
    return name


def _parameters(reader: Reader, call: Call, schema: Mapping[str, Any]) -> Scan[None]:
    """Pass on all parameters, and skip the end of the function. Raises Ended."""
    before = "{"
    if (yield from reader.skip(SPACE)) == "{":
        # Some models write them as JSON in this format, too.
        yield from _object(reader, call)
    while True:
        yield from reader.skip(SPACE)
        if (yield from reader.skip_text(END_FUNCTION)):
            break
        reader.commit()
        try:
            key = yield from _tag(reader, PARAMETER, _KEY)
        except NotACall:
            # It is not part of the call any more.
            reader.at = 0
            break
        call.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        before = ", "
        yield from _value(reader, call, parameter_types(schema, key))
        reader.commit()
    if before != "{":
        call.arguments("}")
    call.end()
    yield from reader.skip_ends(END_FUNCTION, SPACE)


def _object(reader: Reader, call: Call) -> Scan[None]:
    """Pass on all arguments, which are an object in JSON. Raises Ended."""

    def emit(text: str) -> None:
        call.arguments(text)
        reader.commit()

    yield from json_call.arguments(reader, emit)


def _value(reader: Reader, call: Call, types: frozenset[str]) -> Scan[None]:
    """Pass on a value as JSON. Raises Ended."""
    if (yield from reader.peek()) == "\n":
        reader.at += 1
    others = types - {"string"}
    pieces: list[str] = []
    strings = _JsonStrings(types)
    size = next_check = 0
    while True:
        piece, end = _take_piece(reader)
        strings.add(piece)
        is_quoted = strings.is_within and end == END_PARAMETER
        if is_quoted:
            piece, end = piece + end, ""
        pieces.append(piece)
        size += len(piece)
        if end:
            call.arguments(_json("".join(pieces), types))
            return
        # A long value is read again only when it has doubled, which together takes time linear in it.
        if "string" in types and size >= next_check:
            pieces = ["".join(pieces)]
            if not _may_become(pieces[0], others):
                break
            next_check = 2 * size if size > _SHORT_VALUE else 0
        if is_quoted:
            continue
        if reader.ended:
            # It is not known what it would have become.
            text = "".join(pieces)
            call.arguments(f'"{escaped(text)}' if text and "string" in types else text)
            raise Ended
        yield
    call.arguments(f'"{escaped(pieces[0])}')
    while not reader.ended:
        yield
        piece, end = _take_piece(reader)
        call.arguments(escaped(piece))
        if end:
            call.arguments('"')
            return
    raise Ended


def can_be_key(name: str) -> bool:
    """Return whether a parameter can have this name: it is read as it is written."""
    return name != "" and _KEY.fullmatch(name) is not None and name == name.strip()


def reads_as(text: str, types: frozenset[str], value: Any) -> bool:
    """Return whether the text of a parameter with these types is read as this value."""
    found = _VALUE_END.search(f"{text}\n{END_PARAMETER}\n{END_FUNCTION}")
    if found is None or found.start() != len(text):
        return False
    return has_type(value, types) and same(json.loads(_json(text, types)), value)


class _JsonStrings:
    """Strings within an object or array in JSON, which arrives in pieces. They may contain the tag that ends a value,
    but no line break."""

    def __init__(self, types: frozenset[str]) -> None:
        """`types`: those of the value."""
        self.is_within = False
        self._begins = tuple(bracket for bracket, kind in (("{", "object"), ("[", "array")) if kind in types)
        self._is_json: bool | None = None
        """None: nothing has arrived."""
        self._is_escaped = False

    def add(self, piece: str) -> None:
        if self._is_json is None and (begin := piece.lstrip()):
            self._is_json = begin.startswith(self._begins)
        if not self._is_json or not piece:
            return
        begin_at = 1 if self._is_escaped else 0
        self._is_escaped = False
        for found in _STRING_SYNTAX.finditer(piece, begin_at):
            if found[0] == '"':
                self.is_within = not self.is_within
            self._is_escaped = found[0] == "\\"


def _take_piece(reader: Reader) -> tuple[str, str]:
    """Take what has arrived of a value, and its end if it is there; return both."""
    text, begin = reader.text, reader.at
    found = (_LAST_VALUE_END if reader.ended else _VALUE_END).search(text, begin)
    if found:
        end = found.start()
    elif undecided := _UNDECIDED_END.search(text, begin):
        end = undecided.start()
    else:
        end = held_suffix(text, begin, _VALUE_ENDS)
    piece = text[begin:end]
    reader.at = found.end() if found else end
    reader.commit()
    return piece, found[0] if found else ""


def _may_become(text: str, types: frozenset[str]) -> bool:
    """Return whether a value that begins with this text may have one of the types, none of them string."""
    text = text.strip()
    match text[:1]:
        case "":
            return bool(types)
        case "{":
            return "object" in types
        case "[":
            return "array" in types
    if types & {"number", "integer"} and _NUMBER.fullmatch(text):
        return True
    literals = [literal for kind in types for literal in _LITERALS.get(kind, ())]
    return any(literal.startswith(text.lower()) for literal in literals)


def _json(text: str, types: frozenset[str]) -> str:
    """Return the JSON text of a complete value: that of the first type which fits, else of a string."""
    stripped = text.strip()
    others = types - {"string"}
    # A text that was passed on as a string before it was complete is one.
    if others and ("string" not in types or _may_become(text, others)):
        if (read := json_value(stripped)) is not None and has_type(read.value, others):
            return read.text
        for kind in others:
            if stripped.lower() in _LITERALS.get(kind, ()):
                return "null" if kind == "null" else stripped.lower()
        if (literal := python_literal(stripped)) is not None and has_type(literal.value, others):
            return literal.text
    return f'"{escaped(text)}"'


QWEN_XML: Final = ToolFormat("qwen3_coder", (START, FUNCTION), _parse, (END,))
