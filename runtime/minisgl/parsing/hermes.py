"""Hermes: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Qwen2.5 and Qwen3 write calls."""

from __future__ import annotations

from typing import Final

from minisgl.parsing import json_call
from minisgl.parsing.json_text import SPACE
from minisgl.parsing.output import Output
from minisgl.parsing.reader import Reader, Scan
from minisgl.parsing.tool_format import ToolFormat, Tools

START: Final = "<tool_call>"
END: Final = "</tool_call>"


def _parse(reader: Reader, output: Output, tools: Tools) -> Scan[None]:
    yield from reader.skip_text(START)
    yield from reader.skip(SPACE)
    yield from json_call.parse(reader, output)
    # Small models miscount the brackets behind the arguments.
    yield from reader.skip_end(END, SPACE + "}]")


HERMES: Final = ToolFormat("hermes", (START,), _parse, (END,))
