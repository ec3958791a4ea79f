"""Llama 3: `{"name": …, "parameters": {…}}`, alone or behind `<|python_tag|>`; several are separated by semicolons."""

from __future__ import annotations

from typing import Final

from minisgl.parsing import json_call
from minisgl.parsing.call_sequence import parse_calls
from minisgl.parsing.json_text import SPACE
from minisgl.parsing.output import Output
from minisgl.parsing.reader import Reader, Scan
from minisgl.parsing.tool_format import ToolFormat, Tools

PYTHON_TAG: Final = "<|python_tag|>"
_STARTS: Final = ("{", PYTHON_TAG)
_BETWEEN: Final = SPACE + ";,"


def _parse(reader: Reader, output: Output, tools: Tools) -> Scan[None]:
    yield from parse_calls(
        reader,
        output,
        call=lambda: _call(reader, output, tools),
        follows=lambda: reader.skip_to(_STARTS, _BETWEEN),
    )


def _call(reader: Reader, output: Output, tools: Tools) -> Scan[None]:
    if (yield from reader.skip_text(PYTHON_TAG)):
        yield from json_call.parse_several(reader, output, tools, _BETWEEN)
    else:
        yield from reader.skip(SPACE)
        yield from json_call.parse(reader, output, tools)


LLAMA_JSON: Final = ToolFormat("llama3_json", (PYTHON_TAG,), _parse, bare="{")
