"""Hunyuan: `<tool_calls>` around calls, each `<tool_call>NAME`, a fenced block of JSON and `</tool_call>`; larger
models write `<tool_calls>[{"name": …, "arguments": {…}}, …]</tool_calls>`."""

from __future__ import annotations

import re
from typing import Final

from minisgl.parsing import json_call
from minisgl.parsing.call_sequence import parse_calls
from minisgl.parsing.json_text import SPACE
from minisgl.parsing.output import Output
from minisgl.parsing.reader import NotACall, Reader, Scan
from minisgl.parsing.tool_format import ToolFormat, Tools

START: Final = "<tool_calls>"
END: Final = "</tool_calls>"
CALL: Final = "<tool_call>"
END_CALL: Final = "</tool_call>"
OPEN: Final = "\n```json\n"
CLOSE: Final = "\n```"
"""Around the arguments of a call."""
_FENCE: Final = "```"
_NAME: Final = re.compile(r"[^<>\s`{]*")
_LANGUAGE: Final = re.compile(r"[a-z]*")


def _parse(reader: Reader, output: Output, tools: Tools) -> Scan[None]:
    yield from reader.skip_text(START)
    if (yield from reader.skip(SPACE)) == "<":
        yield from parse_calls(
            reader,
            output,
            call=lambda: _named(reader, output),
            follows=lambda: reader.skip_to((CALL,), SPACE),
        )
    else:
        yield from json_call.parse_several(reader, output, tools, SPACE + ",;")
    yield from reader.skip_ends(END, SPACE)


def _named(reader: Reader, output: Output) -> Scan[None]:
    """Parse one call with a name before its arguments. Raises NotACall before it has begun, and Ended."""
    if not (yield from reader.skip_text(CALL)):
        raise NotACall
    yield from reader.skip(SPACE)
    name = yield from reader.match(_NAME)
    yield from reader.skip(SPACE)
    if is_fenced := (yield from reader.skip_text(_FENCE)):
        yield from reader.match(_LANGUAGE)
    if not name or (yield from reader.skip(SPACE)) != "{":
        raise NotACall
    yield from json_call.parse_arguments(reader, output, name)
    if is_fenced:
        yield from reader.skip_end(_FENCE, SPACE)
    yield from reader.skip_ends(END_CALL, SPACE)


def _format(name: str) -> ToolFormat:
    return ToolFormat(name, (START, CALL), _parse, (END, END_CALL))


HUNYUAN: Final = _format("hunyuan")
HUNYUAN_LIST: Final = _format("hunyuan_a13b")
