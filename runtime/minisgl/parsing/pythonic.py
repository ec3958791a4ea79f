"""Pythonic calls: `[f(a=1, b='x'), g()]`, as Llama 3.2 and Llama 4 write them; LFM2 puts markers around the list, and
OLMo 3 writes each on a line of its own, between markers."""

from __future__ import annotations

import re
from typing import Final

from minisgl.parsing import json_call
from minisgl.parsing.call_sequence import parse_calls, parse_list
from minisgl.parsing.json_text import SPACE, escaped
from minisgl.parsing.output import Call, Output
from minisgl.parsing.python_text import json_value, python_literal, string_value
from minisgl.parsing.reader import Ended, NotACall, Reader, Scan
from minisgl.parsing.tool_format import ToolFormat, Tools

START: Final = "<function_calls>"
END: Final = "</function_calls>"
LIST_START: Final = "<|tool_call_start|>"
LIST_END: Final = "<|tool_call_end|>"
_NAME: Final = re.compile(r"[\w.\-]*")
_KEY: Final = re.compile(r"\w*")
_SPECIAL: Final = re.compile(r"""["'()\[\]{},]""")


def _parse(reader: Reader, output: Output, tools: Tools) -> Scan[None]:
    yield from reader.expect("[")
    yield from parse_list(reader, output, lambda: _call(reader, output, tools))


def _parse_marked(reader: Reader, output: Output, tools: Tools) -> Scan[None]:
    yield from reader.skip_text(LIST_START)
    begin = yield from reader.skip(SPACE)
    if begin == "[":
        at = reader.at
        reader.at += 1
        begin = yield from reader.skip(SPACE)
        reader.at = at
        if begin != "{":
            yield from _parse(reader, output, tools)
    elif begin != "{":
        yield from _call(reader, output, tools)
    if begin == "{":
        # As prompts may ask for.
        yield from json_call.parse_several(reader, output, tools, SPACE + "}],;")
    yield from reader.skip_ends(LIST_END, SPACE)


def _parse_lines(reader: Reader, output: Output, tools: Tools) -> Scan[None]:
    yield from reader.skip_text(START)
    if (yield from reader.skip(SPACE)) == "[":
        yield from _parse(reader, output, tools)
    else:
        # Only the first one certainly is a call: the marker of their end may be missing.
        known = iter((None, tools))
        yield from parse_calls(
            reader,
            output,
            call=lambda: _call(reader, output, next(known, tools)),
            follows=lambda: _follows(reader),
        )
    yield from reader.skip_ends(END, SPACE)


def _follows(reader: Reader) -> Scan[bool]:
    return (yield from reader.skip(SPACE + ",;")) not in "<`"


def _call(reader: Reader, output: Output, tools: Tools | None) -> Scan[None]:
    """Parse one call. `tools`: None: that of any tool. Raises NotACall before it has begun, and Ended."""
    yield from reader.skip(SPACE)
    name = yield from reader.match(_NAME)
    yield from reader.expect("(")
    if not name or (tools is not None and name not in tools):
        raise NotACall
    call = Call(output)
    before = "{"
    try:
        while (yield from reader.skip(SPACE)) != ")":
            key = yield from _key(reader)
            if not call.has_begun:
                call.begin(name)
            call.arguments(f'{before}"{escaped(key)}": ')
            before = ", "
            reader.commit()
            yield from _value(reader, call)
            reader.commit()
            if (yield from reader.skip(SPACE)) != ")":
                yield from reader.expect(",")
        reader.at += 1
        if not call.has_begun:
            call.begin(name)
    except NotACall:
        if not call.has_begun:
            raise
        reader.at = 0
    if before != "{":
        call.arguments("}")
    call.end()


def can_be_key(name: str) -> bool:
    """Return whether an argument can have this name."""
    return name != "" and _KEY.fullmatch(name) is not None


def _key(reader: Reader) -> Scan[str]:
    """Return the name of an argument, and skip what is between it and its value. Raises NotACall, Ended."""
    key = yield from reader.match(_KEY)
    yield from reader.skip(SPACE)
    yield from reader.expect("=")
    if not key or (yield from reader.skip(SPACE)) == "=":
        raise NotACall
    return key


def _value(reader: Reader, call: Call) -> Scan[None]:
    """Pass on a value as JSON: a string as it arrives, any other one when it is complete. Raises Ended."""
    if (yield from reader.peek()) in "'\"":

        def emit(text: str) -> None:
            call.arguments(escaped(text))
            reader.commit()

        call.arguments('"')
        yield from string_value(reader, emit)
        call.arguments('"')
        return
    text = yield from _expression(reader, call)
    call.arguments(_json(text.strip()))


def _expression(reader: Reader, call: Call) -> Scan[str]:
    """Return the text up to the comma or bracket that ends an argument. Raises Ended."""
    begin = reader.at
    depth = 0
    while True:
        found = _SPECIAL.search(reader.text, reader.at)
        if found is None:
            reader.at = len(reader.text)
            if reader.ended:
                call.arguments(reader.text[begin:])
                raise Ended
            yield
            continue
        reader.at = found.start()
        match found[0]:
            case "'" | '"':
                yield from string_value(reader, _ignore)
                continue
            case "(" | "[" | "{":
                depth += 1
            case ")" | "]" | "}":
                depth -= 1
        if depth < 0 or (depth == 0 and found[0] == ","):
            return reader.text[begin : reader.at]
        reader.at += 1


def _json(text: str) -> str:
    """Return the JSON text of a Python literal, or of a JSON value in its place; of anything else, as a string."""
    literal = python_literal(text) or json_value(text)
    return f'"{escaped(text)}"' if literal is None else literal.text


def _ignore(text: str) -> None:
    """Strings within an expression are converted with it."""


PYTHONIC: Final = ToolFormat("pythonic", (), _parse, bare="[")
PYTHONIC_MARKED: Final = ToolFormat("lfm2", (LIST_START,), _parse_marked, (LIST_END,), is_inline=True)
PYTHONIC_LINES: Final = ToolFormat("olmo3", (START,), _parse_lines, (END,))
