"""Hermes: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Qwen2.5 and Qwen3 write calls."""

from __future__ import annotations

from typing import Final

from minisgl.parsing import json_call, json_text
from minisgl.parsing.json_text import SPACE
from minisgl.parsing.output import Output
from minisgl.parsing.reader import NotACall, Reader, Scan
from minisgl.parsing.tool_format import ToolFormat, Tools

START: Final = "<tool_call>"
END: Final = "</tool_call>"
_CLOSING: Final = SPACE + "}]"
"""Small models miscount the brackets behind the arguments."""


def _parse(reader: Reader, output: Output, tools: Tools) -> Scan[None]:
    is_marked = False
    # Some models repeat the marker.
    while (yield from reader.skip_text(START)):
        is_marked = True
        yield from reader.skip(SPACE)
    if is_marked:
        yield from json_call.parse_several(reader, output, tools, _CLOSING + ",;")
    else:
        yield from _check_end(reader, tools)
        yield from json_call.parse(reader, output, tools)
    yield from reader.skip_ends(END, _CLOSING)


def _check_end(reader: Reader, tools: Tools) -> Scan[None]:
    """Raise NotACall unless the object at the position names a tool and is followed by the marker of a call's end: the
    one before it is missing. Skips nothing."""
    begin = reader.at
    yield from json_call.check_name(reader, tools)
    reader.at = begin
    yield from json_text.value(reader, lambda text: None)
    if not (yield from reader.skip_to((END,), _CLOSING)) or reader.is_quoted(END):
        raise NotACall
    reader.at = begin


HERMES: Final = ToolFormat("hermes", (START,), _parse, (END,), bare="{")
