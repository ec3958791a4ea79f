"""Calls in tags: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>` and the like.

Values are texts without quotes; the tool's schema decides which of them are strings. A string is passed on as it
arrives; any other value when it is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final

from minisgl.parsing import json_call
from minisgl.parsing.call_sequence import parse_calls
from minisgl.parsing.json_text import SPACE, escaped
from minisgl.parsing.output import Call, Output
from minisgl.parsing.parameter_types import has_type, parameter_types, same
from minisgl.parsing.python_text import json_value, python_literal
from minisgl.parsing.reader import Ended, NotACall, Reader, Scan, held_suffix
from minisgl.parsing.tool_format import ToolFormat, Tools

_BLANKS: Final = r"[ \t\r\n]*"


def _beginnings(text: str) -> str:
    """Return a pattern for any beginning of a text, also the empty one and the whole text."""
    return "".join(f"(?:{re.escape(character)}" for character in text) + ")?" * len(text)


@dataclass(frozen=True)
class XmlSyntax:
    """Tags of a family of models. The breaks between them are those that its chat template writes; any blanks are
    read."""

    start: str
    end: str
    """Markers around a call, or around all calls of an answer."""
    name: tuple[str, str]
    """Texts around the name of a function; empty: it follows the marker."""
    key: tuple[str, str]
    value: tuple[str, str]
    """Texts around the name of a parameter and its value."""
    end_function: str
    """Empty: the marker ends the function."""
    behind_start: str = "\n"
    behind_name: str = "\n"
    behind_key: str = ""
    around_value: str = ""
    behind_value: str = "\n"
    behind_function: str = "\n"
    between: str = "\n"
    """Break between calls with markers of their own."""
    has_shared_markers: bool = False
    """One pair of markers is around all calls."""
    has_tags_as_tokens: bool = False
    """Vocabularies have the tags of parameters as tokens."""

    @property
    def closing(self) -> str:
        """Tag that ends a function."""
        return self.end_function or self.end

    @cached_property
    def name_pattern(self) -> re.Pattern[str]:
        return re.compile(rf"[^<>\s{self.name[1][:1] or '<'}]*")

    @cached_property
    def key_pattern(self) -> re.Pattern[str]:
        return re.compile(rf"[^<>\n{self.key[1][:1]}]*")

    @cached_property
    def free_text(self) -> str:
        """Terminal of grammars for texts without the end of a value."""
        tagged = f"{self.value[1]}{_BLANKS}({self._follows})"
        ends = "|".join(end.replace("\n", r"\n").replace("/", r"\/") for end in (tagged, *self._untagged_ends))
        return f"/(?s:.*)/ & ~/(?s:.*({ends}).*)/"

    @cached_property
    def value_end(self) -> re.Pattern[str]:
        """End of a value in what has arrived."""
        return re.compile(rf"{self._tag}(?={_BLANKS}(?:{self._follows})){self._untagged_end}")

    @cached_property
    def last_value_end(self) -> re.Pattern[str]:
        """The same in the whole text of an answer."""
        ends = rf"{self._follows}|(?:{self.end}{_BLANKS})?\Z"
        return re.compile(rf"{self._tag}(?={_BLANKS}(?:{ends})){self._untagged_end}")

    @cached_property
    def undecided_end(self) -> re.Pattern[str]:
        """A tag at the end of what has arrived: what follows decides whether it ends the value."""
        follows = [*map(_beginnings, dict.fromkeys((self.key[0], self.closing, self.end)))]
        if self.end_function:
            follows.append(f"{self.end}{_BLANKS}{_beginnings(self.start)}")
        return re.compile(rf"{self._tag}(?={_BLANKS}(?:{'|'.join(follows)})\Z)")

    @cached_property
    def value_ends(self) -> tuple[str, ...]:
        """Texts whose beginning, at the end of what has arrived, may be that of a value's end."""
        return (*dict.fromkeys((self.value[1], self.around_value + self.value[1])), *self._untagged_ends)

    @property
    def _tag(self) -> str:
        return rf"\n?{self.value[1]}" if self.around_value else self.value[1]

    @property
    def _follows(self) -> str:
        """Pattern of what follows the tag that ends a value; before anything else, the tag is part of the value."""
        again = [f"{self.end}{_BLANKS}{self.start}"] if self.end_function else []
        return "|".join((self.key[0], self.closing, *again))

    @property
    def _untagged_ends(self) -> tuple[str, ...]:
        """Ends of a value where a model forgets the tag, each behind a line break."""
        if not self.end_function:
            return ()
        return (f"\n{self.key[0]}", f"\n{self.end_function}\n{self.end}")

    @property
    def _untagged_end(self) -> str:
        follows = "|".join(end[1:] for end in self._untagged_ends)
        return f"|\n(?={follows})" if follows else ""


_STRING_SYNTAX: Final = re.compile(r'\\.?|"', re.DOTALL)
_NUMBER: Final = re.compile(r"-?[0-9]*(\.[0-9]*)?([eE][+\-]?[0-9]*)?")
_SHORT_VALUE: Final = 64
_LITERALS: Final[Mapping[str, tuple[str, ...]]] = {"boolean": ("true", "false"), "null": ("null", "none")}


def _parse(syntax: XmlSyntax, reader: Reader, output: Output, tools: Tools) -> Scan[None]:
    is_marked = False
    while (yield from reader.skip_text(syntax.start)):
        is_marked = True
        yield from reader.skip(SPACE)
    begin = syntax.name[0]
    yield from parse_calls(
        reader,
        output,
        # Without the marker, only the name tells a call from a text about such calls.
        call=lambda: _call(syntax, reader, output, tools, is_any=is_marked),
        follows=lambda: reader.skip_to((begin,), SPACE) if begin else _nothing(),
    )
    yield from reader.skip_ends(syntax.end, SPACE)


def _nothing() -> Scan[bool]:
    """Find that no call follows within the same markers."""
    return False
    yield


def _call(syntax: XmlSyntax, reader: Reader, output: Output, tools: Tools, *, is_any: bool) -> Scan[None]:
    """`is_any`: a tool that is not known may be called, too."""
    name = yield from _tag(reader, syntax.name, syntax.name_pattern)
    if not is_any and name not in tools:
        raise NotACall
    if not syntax.name[1] and not (yield from reader.skip_to((syntax.key[0], syntax.closing), SPACE)):
        # No tag ends the name: it may be any word.
        raise NotACall
    call = Call(output)
    call.begin(name)
    reader.commit()
    yield from _parameters(syntax, reader, call, tools.get(name, {}))


def _tag(reader: Reader, around: tuple[str, str], pattern: re.Pattern[str]) -> Scan[str]:
    """Return the name between two texts, as in `<function=NAME>`. Raises NotACall, Ended."""
    if not (yield from reader.skip_text(around[0])):
        raise NotACall
    name = (yield from reader.match(pattern)).strip()
    if not (yield from reader.skip_text(around[1])) or not name:
        raise NotACall
    return name


def _parameters(syntax: XmlSyntax, reader: Reader, call: Call, schema: Mapping[str, Any]) -> Scan[None]:
    """Pass on all parameters, and skip the end of the function. Raises Ended."""
    before = "{"
    if (yield from reader.skip(SPACE)) == "{":
        # Some models write them as JSON in this format, too.
        yield from _object(reader, call)
    while True:
        yield from reader.skip(SPACE)
        if (yield from reader.skip_text(syntax.closing)):
            break
        reader.commit()
        try:
            key = yield from _tag(reader, syntax.key, syntax.key_pattern)
            if begin := syntax.value[0]:
                yield from reader.skip(SPACE)
                if not (yield from reader.skip_text(begin)):
                    raise NotACall
        except NotACall:
            # It is not part of the call any more.
            reader.at = 0
            break
        call.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        before = ", "
        yield from _value(syntax, reader, call, parameter_types(schema, key))
        reader.commit()
    if before != "{":
        call.arguments("}")
    call.end()
    yield from reader.skip_ends(syntax.closing, SPACE)


def _object(reader: Reader, call: Call) -> Scan[None]:
    """Pass on all arguments, which are an object in JSON. Raises Ended."""

    def emit(text: str) -> None:
        call.arguments(text)
        reader.commit()

    yield from json_call.arguments(reader, emit)


def _value(syntax: XmlSyntax, reader: Reader, call: Call, types: frozenset[str]) -> Scan[None]:
    """Pass on a value as JSON. Raises Ended."""
    if syntax.around_value and (yield from reader.peek()) == syntax.around_value:
        reader.at += 1
    others = types - {"string"}
    pieces: list[str] = []
    strings = _JsonStrings(types)
    size = next_check = 0
    while True:
        piece, end = _take_piece(syntax, reader)
        strings.add(piece)
        is_quoted = strings.is_within and end == syntax.value[1] and not reader.is_token(end)
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
        piece, end = _take_piece(syntax, reader)
        call.arguments(escaped(piece))
        if end:
            call.arguments('"')
            return
    raise Ended


def can_be_key(syntax: XmlSyntax, name: str) -> bool:
    """Return whether a parameter can have this name: it is read as it is written."""
    return name != "" and syntax.key_pattern.fullmatch(name) is not None and name == name.strip()


def reads_as(syntax: XmlSyntax, text: str, types: frozenset[str], value: Any) -> bool:
    """Return whether the text of a parameter with these types is read as this value."""
    found = syntax.value_end.search(f"{text}{syntax.around_value}{syntax.value[1]}\n{syntax.closing}")
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


def _take_piece(syntax: XmlSyntax, reader: Reader) -> tuple[str, str]:
    """Take what has arrived of a value, and its end if it is there; return both."""
    text, begin = reader.text, reader.at
    if reader.is_token(tag := syntax.value[1]):
        # Where the model forgets the tag, the next one ends the value.
        ends = (tag, syntax.key[0], syntax.closing)
        mark = next((mark for mark in reader.marks if mark.at >= begin and mark.marker.text in ends), None)
        piece = text[begin : None if mark is None else mark.at]
        reader.at = begin + len(piece)
        if mark is not None and mark.marker.text == tag:
            reader.at += len(tag)
        reader.commit()
        return piece, "" if mark is None else tag
    found = (syntax.last_value_end if reader.ended else syntax.value_end).search(text, begin)
    if found:
        end = found.start()
    elif undecided := syntax.undecided_end.search(text, begin):
        end = undecided.start()
    else:
        end = held_suffix(text, begin, syntax.value_ends)
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


def _format(name: str, syntax: XmlSyntax) -> ToolFormat:
    starts = (syntax.start, syntax.name[0]) if syntax.name[0] else (syntax.start,)
    tags = (*syntax.key, *syntax.value) if syntax.has_tags_as_tokens else ()
    return ToolFormat(name, starts, partial(_parse, syntax), (syntax.end, *tags))


_QWEN: Final = XmlSyntax(
    start="<tool_call>",
    end="</tool_call>",
    name=("<function=", ">"),
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    end_function="</function>",
    around_value="\n",
)
_GLM: Final = XmlSyntax(
    start="<tool_call>",
    end="</tool_call>",
    name=("", ""),
    key=("<arg_key>", "</arg_key>"),
    value=("<arg_value>", "</arg_value>"),
    end_function="",
    behind_start="",
    behind_key="\n",
    behind_function="",
    has_tags_as_tokens=True,
)
SYNTAXES: Final[Mapping[str, XmlSyntax]] = {
    "qwen3_coder": _QWEN,
    "seed_oss": replace(_QWEN, start="<seed:tool_call>", end="</seed:tool_call>", around_value=""),
    "minimax_m2": XmlSyntax(
        start="<minimax:tool_call>",
        end="</minimax:tool_call>",
        name=('<invoke name="', '">'),
        key=('<parameter name="', '">'),
        value=("", "</parameter>"),
        end_function="</invoke>",
        has_shared_markers=True,
    ),
    "glm45": _GLM,
    "glm47": replace(_GLM, behind_name="", behind_key="", behind_value="", between=""),
}
XML_FORMATS: Final[Mapping[str, ToolFormat]] = {name: _format(name, syntax) for name, syntax in SYNTAXES.items()}
