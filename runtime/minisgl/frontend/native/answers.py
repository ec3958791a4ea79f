"""The answers of /generate: JSON with `text` and `meta_info`, and plain text as server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from minisgl.frontend.openai.answers import DONE, Choice
from minisgl.frontend.server.response_stream import Delta
from minisgl.wire.text import Finished

_json = msgspec.json.encode


def whole_native(answer_id: str, choices: Sequence[Choice], *, listed: bool) -> bytes:
    """An object, or a list of them where the request had several prompts or choices."""
    answers = [
        {"text": choice.text, "meta_info": _meta(answer_id, index, choice.finished, listed)}
        for index, choice in enumerate(choices)
    ]
    return _json(answers if listed else answers[0])


class NativeChunks:
    """Every event holds the whole text so far."""

    def __init__(self, answer_id: str, prompt_tokens: Sequence[int], *, listed: bool) -> None:
        self._id = answer_id
        self._prompt_tokens = prompt_tokens
        self._listed = listed
        self._texts = [""] * len(prompt_tokens)

    def first(self) -> bytes:
        return b""

    def event(self, news: Delta) -> bytes:
        self._texts[news.choice] += news.text
        if news.finished is not None:
            meta = _meta(self._id, news.choice, news.finished, self._listed)
        else:
            meta = {
                "id": _id(self._id, news.choice, self._listed),
                "finish_reason": None,
                "prompt_tokens": self._prompt_tokens[news.choice],
                "completion_tokens": news.tokens,
            }
        event: dict[str, Any] = {"text": self._texts[news.choice], "meta_info": meta}
        if self._listed:
            event["index"] = news.choice
        return b"data: " + _json(event) + b"\n\n"

    def last(self, ends: Sequence[Finished]) -> bytes:
        return DONE


class PlainChunks:
    """Every event is the text that is new. A line break in it begins another `data:` line, as the standard of
    server-sent events has it."""

    def first(self) -> bytes:
        return b""

    def event(self, news: Delta) -> bytes:
        if not news.text:
            return b""
        return b"".join(b"data: %s\n" % line.encode() for line in news.text.split("\n")) + b"\n"

    def last(self, ends: Sequence[Finished]) -> bytes:
        return DONE


def _meta(answer_id: str, index: int, end: Finished, listed: bool) -> dict[str, Any]:
    reason: dict[str, Any] = {"type": end.reason}
    if end.reason == "length":
        reason["length"] = end.completion_tokens
    return {
        "id": _id(answer_id, index, listed),
        "finish_reason": reason,
        "prompt_tokens": end.prompt_tokens,
        "completion_tokens": end.completion_tokens,
        "cached_tokens": end.cached_tokens,
    }


def _id(answer_id: str, index: int, listed: bool) -> str:
    return f"{answer_id}-{index}" if listed else answer_id
