"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`; newer models `[TOOL_CALLS]NAME[ARGS]{…}` for each call."""

from __future__ import annotations

import re
from typing import Final

from minisgl.parsing import json_call
from minisgl.parsing.json_text import SPACE
from minisgl.parsing.output import Output, short_call_id
from minisgl.parsing.reader import NotACall, Reader, Scan
from minisgl.parsing.tool_format import ToolFormat, Tools

START: Final = "[TOOL_CALLS]"
CALL_ID: Final = "[CALL_ID]"
ARGS: Final = "[ARGS]"
_NAME: Final = re.compile(r"[\w.\-]*")


def _parse(reader: Reader, output: Output, tools: Tools) -> Scan[None]:
    yield from reader.skip_text(START)
    if (yield from reader.skip(SPACE)) in "[{":
        yield from json_call.parse_several(reader, output, tools, SPACE + ",;")
    else:
        yield from _named(reader, output)


def _named(reader: Reader, output: Output) -> Scan[None]:
    name = yield from reader.match(_NAME)
    if not name:
        raise NotACall
    if (yield from reader.skip_text(CALL_ID)):
        yield from reader.match(_NAME)
    is_marked = yield from reader.skip_text(ARGS)
    if not is_marked and (yield from reader.skip(SPACE)) != "{":
        raise NotACall
    yield from json_call.parse_arguments(reader, output, name)


MISTRAL: Final = ToolFormat("mistral", (START,), _parse, (CALL_ID, ARGS), is_inline=True, new_id=short_call_id)
