"""Log lines: JSON objects for programs, coloured text on a terminal.

Modules log with `logging.getLogger(__name__)`. Child processes always write JSON to stderr; the launcher, which reads
it, renders every line in the configured format. Text that is not a log line (a traceback, a library's warning) keeps
its position and gets the name of the process.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Final, Literal, TextIO

import msgspec

from minisgl.options import option

LogFormat = Literal["auto", "text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

_COLOURS: Final = {"debug": "2", "warning": "33", "error": "31", "critical": "31"}
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
        self._colours = terminal and not self.json

    def render(self, line: Line) -> str:
        if self.json:
            return msgspec.json.encode(line).decode()
        extra = "".join(f" {name}={value}" for name, value in line.extra.items())
        text = f"{line.time.astimezone():%H:%M:%S} {line.level:<7} {line.process:<11} {line.message}{extra}"
        if self._colours and line.level in _COLOURS:
            text = f"\033[{_COLOURS[line.level]}m{text}\033[0m"
        return f"{text}\n{line.traceback}" if line.traceback else text


class _Handler(logging.Handler):
    def __init__(self, process: str, format: LogFormat, stream: TextIO) -> None:
        super().__init__()
        self._process = process
        self._stream = stream
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
        try:
            self._stream.write(self._renderer.render(line) + "\n")
            self._stream.flush()
        except OSError:
            # The stream is closed, so this error cannot be reported either.
            return


def set_up(process: str, level: LogLevel = "info", format: LogFormat = "auto", stream: TextIO | None = None) -> None:
    """Write every log record of this process to `stream` (default: stderr), in lines that name `process`."""
    root = logging.getLogger()
    root.handlers[:] = [_Handler(process, format, stream or sys.stderr)]
    root.setLevel(level.upper())


def writer(format: LogFormat) -> Callable[[Line], None]:
    """Function that writes lines of other processes to stderr."""
    renderer = Renderer(format, sys.stderr)
    return lambda line: print(renderer.render(line), file=sys.stderr, flush=True)


def parse(text: str, process: str) -> Line:
    """Parse a line that a process of this program wrote; any other text becomes a warning from `process`."""
    if text.startswith('{"time":'):
        try:
            return _decoder.decode(text)
        except msgspec.MsgspecError:
            pass
    return Line(time=datetime.now(UTC), level="warning", process=process, message=text)
