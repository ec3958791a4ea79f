"""Calls as JSON objects behind a marker: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes, Qwen2.5 and
Qwen3 write them, or one list of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from minisgl.parsing import json_call, json_text
from minisgl.parsing.json_text import SPACE
from minisgl.parsing.output import Output
from minisgl.parsing.reader import NotACall, Reader, Scan
from minisgl.parsing.tool_format import ToolFormat, Tools

_CLOSING: Final = SPACE + "}]"
"""Small models miscount the brackets behind the arguments."""


@dataclass(frozen=True)
class JsonSyntax:
    """Markers of a family of models. Objects and lists of them are read behind each; what is written differs."""

    start: str
    end: str = ""
    """Empty: nothing marks the end."""
    around: str = ""
    """Break between the markers and what they mark."""
    between: str = "\n"
    """Break between calls with markers of their own."""
    is_list: bool = False
    """One pair of markers is around a list of all calls."""
    other_starts: tuple[str, ...] = ()
    """Other texts that begin calls, with the bracket of their list."""


def _parse(syntax: JsonSyntax, reader: Reader, output: Output, tools: Tools) -> Scan[None]:
    is_marked = False
    # Some models repeat the marker.
    while (yield from _skip_start(syntax, reader)):
        is_marked = True
        yield from reader.skip(SPACE)
    if is_marked:
        yield from json_call.parse_several(reader, output, tools, _CLOSING + ",;")
    else:
        yield from _check_end(syntax, reader, tools)
        yield from json_call.parse(reader, output, tools)
    if syntax.end:
        yield from reader.skip_ends(syntax.end, _CLOSING)


def _skip_start(syntax: JsonSyntax, reader: Reader) -> Scan[bool]:
    for start in (syntax.start, *syntax.other_starts):
        if (yield from reader.skip_text(start)):
            reader.at -= start.endswith("[")
            return True
    return False


def _check_end(syntax: JsonSyntax, reader: Reader, tools: Tools) -> Scan[None]:
    """Raise NotACall unless the object at the position names a tool and is followed by the marker of a call's end: the
    one before it is missing. Skips nothing."""
    begin = reader.at
    yield from json_call.check_name(reader, tools)
    reader.at = begin
    yield from json_text.value(reader, lambda text: None)
    if not (yield from reader.skip_to((syntax.end,), _CLOSING)) or reader.is_quoted(syntax.end):
        raise NotACall
    reader.at = begin


def _format(name: str, syntax: JsonSyntax) -> ToolFormat:
    return ToolFormat(
        name,
        (syntax.start, *syntax.other_starts),
        partial(_parse, syntax),
        (syntax.end,) if syntax.end else (),
        bare="{" if syntax.end and not syntax.is_list else "",
    )


_HERMES: Final = JsonSyntax("<tool_call>", "</tool_call>", around="\n")
SYNTAXES: Final[Mapping[str, JsonSyntax]] = {
    "hermes": _HERMES,
    "exaone4": replace(_HERMES, around=""),
    "granite": JsonSyntax("<|tool_call|>", is_list=True, other_starts=("<tool_call>",)),
    "nemotron_json": JsonSyntax("<TOOLCALL>", "</TOOLCALL>", is_list=True),
    "phi4_mini": JsonSyntax("<|tool_call|>", "<|/tool_call|>", is_list=True, other_starts=("functools[",)),
}
JSON_FORMATS: Final[Mapping[str, ToolFormat]] = {name: _format(name, syntax) for name, syntax in SYNTAXES.items()}
