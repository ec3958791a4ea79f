"""Log lines as text and as JSON."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

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


def test_a_terminal_gets_coloured_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = _Terminal()
    log.set_up("rank0", stream=stream)
    logging.getLogger("minisgl.x").warning("careful", extra={"step": 3})
    assert "\033[33m" in stream.getvalue()
    assert "warning rank0       careful step=3" in stream.getvalue()


def test_a_terminal_gets_text_without_colours_if_the_variable_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = _Terminal()
    log.set_up("rank0", stream=stream)
    logging.getLogger("minisgl.x").warning("careful")
    assert "warning rank0       careful" in stream.getvalue()
    assert "\033" not in stream.getvalue()


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


@contextmanager
def _pipe() -> Iterator[tuple[int, TextIO]]:
    """A pipe: descriptor of its end for reading, and stream of the other one."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        try:
            yield reader, stream
        finally:
            os.close(reader)


def _lost_by(stream: TextIO, monkeypatch: pytest.MonkeyPatch, text: str = "x") -> int:
    """Write lines of this process and of a child to `stream`; returns how many were lost."""
    monkeypatch.setattr(sys, "stderr", stream)
    before = log.lost_lines.total
    log.set_up("launcher", format="json")
    logging.getLogger("minisgl.x").warning(text)
    log.writer("json")(log.parse(text, "rank0"))
    log.write_stderr(text)
    return log.lost_lines.total - before


def test_lines_for_a_full_disk_are_lost_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        assert _lost_by(full, monkeypatch) == 3


def test_lines_for_a_closed_pipe_are_lost_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        os.close(reader)
        assert _lost_by(stream, monkeypatch) == 3


def test_a_reader_that_stops_reading_does_not_stop_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_READER_SECONDS", 0.0)
    with _pipe() as (reader, stream):
        text = "x" * 65_536
        assert _lost_by(stream, monkeypatch, text) == 3
        output = log.Output(stream)
        output.write_line("lost too")
        os.read(reader, 1 << 20)
        output.write_line("read")
        assert os.read(reader, 1 << 20).decode() == "read\n"


def test_a_line_after_one_that_was_cut_begins_on_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_READER_SECONDS", 0.0)
    with _pipe() as (reader, stream):
        output = log.Output(stream)
        output.write_line("x" * (1 << 20))
        cut = os.read(reader, 1 << 20)
        output.write_line("whole")
        assert cut.strip(b"x") == b""
        assert os.read(reader, 1 << 20) == b"\nwhole\n"


def test_processes_that_inherit_the_number_of_lost_lines_can_read_it() -> None:
    lost = log.LostLines()
    lost.add()
    descriptor = lost.share()
    lost.add()
    code = f"from minisgl.logging import LostLines; print(LostLines.read({descriptor}))"
    read = subprocess.run([sys.executable, "-c", code], pass_fds=(descriptor,), capture_output=True, check=True)
    assert int(read.stdout) == 2


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-", "2>&- >&-", ">/dev/null"])
def test_the_exit_code_of_a_failed_command_does_not_depend_on_stderr(redirection: str) -> None:
    command = f"{sys.executable} -m minisgl serve /nowhere/at/all {redirection}"
    assert subprocess.run(["/bin/sh", "-c", command], check=False, stdin=subprocess.DEVNULL).returncode == 1
