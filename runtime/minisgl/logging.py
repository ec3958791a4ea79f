"""Log lines: JSON objects for programs, coloured text on a terminal.

Modules log with `logging.getLogger(__name__)`. Child processes always write JSON to stderr; the launcher, which reads
it, renders every line in the configured format. Text that is not a log line (a traceback, a library's warning) keeps
its position and gets the name of the process.

No process depends on who reads its lines: one that cannot be written is lost and counted (`lost_lines`).
"""

from __future__ import annotations

import logging
import os
import select
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Final, Literal, TextIO

import msgspec

from minisgl.options import option

LogFormat = Literal["auto", "text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

_COLOURS: Final = {"debug": "2", "warning": "33", "error": "31", "critical": "31"}
_COUNT_BYTES: Final = 8
_READER_SECONDS: Final = 1.0
"""Longest time to wait for who reads a pipe, once until it reads again."""
_STANDARD_ATTRIBUTES: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LogOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Log options of a command."""

    level: Annotated[LogLevel, option("minimum level of log lines on stderr")] = msgspec.field(
        default="info", name="log_level"
    )
    format: Annotated[
        LogFormat,
        option("text, or json: one object per line", default="auto, text on a terminal"),
    ] = msgspec.field(default="auto", name="log_format")


class Line(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One log line."""

    time: datetime
    level: str
    process: str
    logger: str = ""
    message: str
    extra: dict[str, str | int | float | bool | None] = {}
    traceback: str = ""


_decoder: Final = msgspec.json.Decoder(Line)


class Renderer:
    """Renders lines as text for one stream."""

    def __init__(self, format: LogFormat, stream: TextIO) -> None:
        terminal = stream.isatty()
        self.json = format == "json" or (format == "auto" and not terminal)
        # The variable turns colours off unless it is empty: https://no-color.org
        self._colours = terminal and not self.json and not os.environ.get("NO_COLOR")

    def render(self, line: Line) -> str:
        if self.json:
            return msgspec.json.encode(line).decode()
        extra = "".join(f" {name}={value}" for name, value in line.extra.items())
        text = f"{line.time.astimezone():%H:%M:%S} {line.level:<7} {line.process:<11} {line.message}{extra}"
        if self._colours and line.level in _COLOURS:
            text = f"\033[{_COLOURS[line.level]}m{text}\033[0m"
        return f"{text}\n{line.traceback}" if line.traceback else text


class LostLines:
    """Number of lines that this process could not write."""

    def __init__(self) -> None:
        self.total = 0
        self._shared: int | None = None

    def add(self) -> None:
        self.total += 1
        self._publish()

    def share(self) -> int:
        """Descriptor of a file in memory from which processes that inherit it `read` the number."""
        if self._shared is None:
            self._shared = os.memfd_create("lost-log-lines")
            self._publish()
        return self._shared

    @staticmethod
    def read(descriptor: int) -> int:
        return int.from_bytes(os.pread(descriptor, _COUNT_BYTES, 0), "little")

    def _publish(self) -> None:
        if self._shared is not None:
            os.pwrite(self._shared, self.total.to_bytes(_COUNT_BYTES, "little"), 0)


lost_lines: Final = LostLines()


class Output:
    """Writes lines to a stream. A line is lost, and counted, when the disk is full, the reader of a pipe has closed it,
    or the reader reads nothing for a while."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_stuck = False
        """The last line waited in vain: the next ones do not wait."""
        self._is_cut = False
        """The last line was written in part."""

    def write_line(self, text: str) -> None:
        """Never raises an error."""
        try:
            descriptor = self._stream.fileno()
        except (OSError, ValueError):
            descriptor = None
        try:
            if descriptor is None:
                self._stream.write(text + "\n")
                self._stream.flush()
            else:
                # Not through the stream, which would keep what it cannot write, and fail again at the exit.
                self._write(descriptor, ("\n" * self._is_cut + text + "\n").encode(errors="backslashreplace"))
        except (OSError, ValueError):
            lost_lines.add()

    def _write(self, descriptor: int, data: bytes) -> None:
        """Raises OSError."""
        left = memoryview(data)
        try:
            while left:
                self._wait(descriptor)
                # As much as a pipe takes at once when it has room at all.
                left = left[os.write(descriptor, left[: select.PIPE_BUF]) :]
        finally:
            if len(left) < len(data):
                self._is_cut = len(left) > 0

    def _wait(self, descriptor: int) -> None:
        """Wait until the reader has made room. Raises TimeoutError."""
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        is_ready = bool(poll.poll(0 if self._is_stuck else _READER_SECONDS * 1000))
        self._is_stuck = not is_ready
        if not is_ready:
            raise TimeoutError


def write_stderr(text: str) -> None:
    """Write a line that is no log line to stderr; never raises an error."""
    Output(sys.stderr).write_line(text)


class _Handler(logging.Handler):
    def __init__(self, process: str, format: LogFormat, stream: TextIO) -> None:
        super().__init__()
        self._process = process
        self._output = Output(stream)
        self._renderer = Renderer(format, stream)
        self._exceptions = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        extra = {name: value for name, value in vars(record).items() if name not in _STANDARD_ATTRIBUTES}
        line = Line(
            time=datetime.fromtimestamp(record.created, UTC),
            level=record.levelname.lower(),
            process=self._process,
            logger=record.name,
            message=record.getMessage(),
            extra={k: v if isinstance(v, str | int | float | bool | None) else str(v) for k, v in extra.items()},
            traceback=self._exceptions.formatException(record.exc_info) if record.exc_info else "",
        )
        self._output.write_line(self._renderer.render(line))


def set_up(process: str, level: LogLevel = "info", format: LogFormat = "auto", stream: TextIO | None = None) -> None:
    """Write every log record of this process to `stream` (default: stderr), in lines that name `process`."""
    root = logging.getLogger()
    root.handlers[:] = [_Handler(process, format, stream or sys.stderr)]
    root.setLevel(level.upper())


def writer(format: LogFormat) -> Callable[[Line], None]:
    """Function that writes lines of other processes to stderr."""
    renderer, output = Renderer(format, sys.stderr), Output(sys.stderr)
    return lambda line: output.write_line(renderer.render(line))


def parse(text: str, process: str) -> Line:
    """Parse a line that a process of this program wrote; any other text becomes a warning from `process`."""
    if text.startswith('{"time":'):
        try:
            return _decoder.decode(text)
        except msgspec.MsgspecError:
            pass
    return Line(time=datetime.now(UTC), level="warning", process=process, message=text)
