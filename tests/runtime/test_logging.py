"""Log lines as text and as JSON."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from minisgl import logging as log


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before


def test_a_stream_that_is_not_a_terminal_gets_one_json_object_per_line() -> None:
    stream = io.StringIO()
    log.set_up("rank0", stream=stream)
    try:
        raise ValueError("a\nb")
    except ValueError:
        logging.getLogger("minisgl.x").exception("it %s", "broke", extra={"step": 3, "path": object})
    [line] = stream.getvalue().splitlines()
    document = json.loads(line)
    assert document["level"] == "error"
    assert document["process"] == "rank0"
    assert document["message"] == "it broke"
    assert document["extra"]["step"] == 3
    assert document["traceback"].endswith("ValueError: a\nb")


def test_a_terminal_gets_coloured_text() -> None:
    stream = _Terminal()
    log.set_up("rank0", stream=stream)
    logging.getLogger("minisgl.x").warning("careful", extra={"step": 3})
    assert "\033[33m" in stream.getvalue()
    assert "warning rank0       careful step=3" in stream.getvalue()


def test_lines_below_the_level_are_dropped() -> None:
    stream = io.StringIO()
    log.set_up("rank0", "warning", "text", stream)
    logging.getLogger("minisgl.x").info("not this")
    logging.getLogger("minisgl.x").error("but this")
    assert "not this" not in stream.getvalue()
    assert "but this" in stream.getvalue()


def test_a_parsed_line_renders_as_it_was_written() -> None:
    stream = io.StringIO()
    log.set_up("rank0", format="json", stream=stream)
    logging.getLogger("minisgl.x").info("hello", extra={"step": 3})
    line = log.parse(stream.getvalue().rstrip(), "rank0")
    assert (line.message, line.level, line.extra) == ("hello", "info", {"step": 3})
    assert log.Renderer("json", stream).render(line) == stream.getvalue().rstrip()


@pytest.mark.parametrize("text", ["Segmentation fault", '{"time": "yesterday"}', '{"time":1}'])
def test_other_output_becomes_a_warning_from_its_process(text: str) -> None:
    line = log.parse(text, "rank1")
    assert (line.level, line.process, line.message) == ("warning", "rank1", text)


def test_a_closed_stream_raises_no_error() -> None:
    class Broken(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    log.set_up("rank0", stream=Broken())
    logging.getLogger("minisgl.x").warning("unread")
