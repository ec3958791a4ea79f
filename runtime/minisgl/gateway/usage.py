"""Finds the frontend's report of used tokens in a stream and takes it out, without reading its events."""

from __future__ import annotations

from typing import Final

import msgspec

from minisgl.frontend.server.usage_report import COMMENT, Usage

_decoder: Final = msgspec.json.Decoder(Usage)
_MAX_LINE: Final = 256
"""Longest report, in bytes."""
_EVENT: Final = b"data: "
_NEXT_EVENT: Final = b"\n" + _EVENT
_BYTES_PER_TOKEN: Final = 4
"""Of a body, to estimate the tokens of its prompt."""


def estimated_usage(body_bytes: int) -> Usage:
    """Return the usage of a request that a frontend has got, while nothing more is known of it."""
    return Usage(body_bytes // _BYTES_PER_TOKEN, 0)


def usage_attributes(usage: Usage) -> dict[str, int]:
    """Return the attributes of a request's span in a trace."""
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
    }


def events_in(piece: bytes) -> int:
    """Return the number of events in a piece of a stream, at least one: each has a token at least."""
    return max(piece.count(_NEXT_EVENT) + piece.startswith(_EVENT), 1)


def read_usage(text: bytes) -> Usage | None:
    """Return the usage in a header's value or a comment; None: it is none, or has numbers that no request has."""
    try:
        return _decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


class UsageFilter:
    """Takes the report out of a stream that is given in any pieces. All other bytes stay as they are. An answer cannot
    contain a report: its text is in JSON, which has no line breaks."""

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self._kept = b""
        """Beginning of a line that may be the report."""
        self._begins_line = True
        """The next byte is the first of a line."""

    def feed(self, piece: bytes) -> bytes:
        """Return what the client gets of the stream now; it may be empty."""
        if self._kept:
            piece, self._kept = self._kept + piece, b""
        if COMMENT not in piece and piece.endswith(b"\n"):
            # Nearly all pieces.
            self._begins_line = True
            return piece
        return self._searched(piece)

    def rest(self) -> bytes:
        """Return what was kept, at the end of the stream."""
        kept, self._kept = self._kept, b""
        return kept

    def _searched(self, piece: bytes) -> bytes:
        passed = b""
        at = -1
        while (at := piece.find(COMMENT, at + 1)) >= 0:
            if not self._is_line_start(piece, at):
                continue
            end = piece.find(b"\n\n", at)
            if end < 0:
                break
            usage = read_usage(piece[at + len(COMMENT) : end])
            if usage is not None:
                self.usage = usage
                passed += piece[:at]
                self._begins_line = True
                piece, at = piece[end + 2 :], -1
        begin = piece.rfind(b"\n") + 1
        if at >= 0:
            begin = at
        line = piece[begin:]
        may_be_report = 0 < len(line) < _MAX_LINE and COMMENT.startswith(line[: len(COMMENT)])
        if may_be_report and self._is_line_start(piece, begin):
            self._kept = line
            piece = piece[:begin]
        if piece:
            self._begins_line = piece.endswith(b"\n")
        return passed + piece

    def _is_line_start(self, piece: bytes, at: int) -> bool:
        return piece[at - 1 : at] == b"\n" if at else self._begins_line
