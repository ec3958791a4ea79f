"""Responses of /generate: JSON with `text` and `meta_info`, or plain text as server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from minisgl.frontend.errors import ApiError
from minisgl.frontend.generation.response_format import DONE, EventFormat, error_event
from minisgl.frontend.server.response_stream import Delta
from minisgl.wire.text import Finished

_json = msgspec.json.encode


class NativeFormat(msgspec.Struct, frozen=True):
    """Response to /generate."""

    is_list: bool = False
    """The request has several prompts or choices, so the response is a list."""
    text_only: bool = False
    """The events of a stream are plain text."""

    def full(self, response_id: str, model: str, choices: Sequence[Delta]) -> bytes:
        objects = [{"text": choice.text, "meta_info": self.meta_info(response_id, choice, 0)} for choice in choices]
        return _json(objects if self.is_list else objects[0])

    def events(self, response_id: str, model: str, prompt_tokens: Sequence[int]) -> EventFormat:
        return TextEvents() if self.text_only else NativeEvents(self, response_id, prompt_tokens)

    def meta_info(self, response_id: str, delta: Delta, prompt_tokens: int) -> dict[str, Any]:
        """`prompt_tokens`: those of a choice that has not finished."""
        info: dict[str, Any] = {"id": f"{response_id}-{delta.index}" if self.is_list else response_id}
        end = delta.finished
        if end is None:
            return info | {
                "finish_reason": None,
                "prompt_tokens": prompt_tokens,
                "completion_tokens": delta.tokens,
            }
        reason: dict[str, Any] = {"type": end.reason}
        if end.reason == "length":
            reason["length"] = end.completion_tokens
        return info | {
            "finish_reason": reason,
            "prompt_tokens": end.prompt_tokens,
            "completion_tokens": end.completion_tokens,
            "cached_tokens": end.cached_tokens,
        }


class NativeEvents:
    """Server-sent events, each with the whole text so far."""

    first = b""
    text_event = None

    def __init__(self, format: NativeFormat, response_id: str, prompt_tokens: Sequence[int]) -> None:
        """`prompt_tokens`: those of each choice's prompt."""
        self._format = format
        self._id = response_id
        self._prompt_tokens = prompt_tokens
        self._texts = [""] * len(prompt_tokens)

    def event(self, delta: Delta) -> bytes:
        self._texts[delta.index] += delta.text
        meta = self._format.meta_info(self._id, delta, self._prompt_tokens[delta.index])
        event: dict[str, Any] = {"text": self._texts[delta.index], "meta_info": meta}
        if self._format.is_list:
            event["index"] = delta.index
        return b"data: " + _json(event) + b"\n\n"

    def last(self, ends: Sequence[Finished]) -> bytes:
        return DONE

    def error(self, error: ApiError) -> bytes:
        return error_event(error)


class TextEvents:
    """Server-sent events, each with new text. A line break in it begins another `data:` line, as the standard of
    server-sent events requires."""

    first = b""
    text_event = None

    def event(self, delta: Delta) -> bytes:
        if not delta.text:
            return b""
        return b"".join(b"data: %s\n" % line.encode() for line in delta.text.split("\n")) + b"\n"

    def last(self, ends: Sequence[Finished]) -> bytes:
        return DONE

    def error(self, error: ApiError) -> bytes:
        return error_event(error)
