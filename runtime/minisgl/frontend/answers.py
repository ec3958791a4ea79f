"""The JSON of answers: whole ones, and the chunks of a stream, of which everything but the text is rendered once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from minisgl.wire.text import Finished

Kind = Literal["chat", "completion"]

_json = msgspec.json.encode

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


class Head:
    """What every part of one answer repeats."""

    def __init__(self, kind: Kind, answer_id: str, model: str) -> None:
        self.kind: Kind = kind
        self.id = ("chatcmpl-" if kind == "chat" else "cmpl-") + answer_id
        self.model = model
        self.created = int(time.time())

    def fields(self, object: str) -> dict[str, Any]:
        return {"id": self.id, "object": object, "created": self.created, "model": self.model}


def whole(head: Head, texts: Sequence[str], ends: Sequence[Finished]) -> bytes:
    """The answer of a request that did not ask for a stream."""
    choices: list[dict[str, Any]] = []
    for index, (text, end) in enumerate(zip(texts, ends, strict=True)):
        content = (
            {"message": {"role": "assistant", "content": text, "refusal": None}}
            if head.kind == "chat"
            else {"text": text}
        )
        choices.append({"index": index, **content, "logprobs": None, "finish_reason": end.reason})
    kind = "chat.completion" if head.kind == "chat" else "text_completion"
    return _json({**head.fields(kind), "choices": choices, "usage": usage(ends)})


def usage(ends: Sequence[Finished]) -> dict[str, Any]:
    prompt = sum(end.prompt_tokens for end in ends)
    completion = sum(end.completion_tokens for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in ends)},
    }


class Chunks:
    """Server-sent events of one stream."""

    def __init__(self, head: Head, include_usage: bool) -> None:
        self._head = head
        self._object = "chat.completion.chunk" if head.kind == "chat" else "text_completion"
        # {"id": …, "model": …} without its closing brace, then the one choice of the chunk.
        self._begin = b"data: " + _json(head.fields(self._object))[:-1] + b',"choices":['
        self._end = (b',"usage":null}' if include_usage else b"}") + b"\n\n"
        self._before_text = b',"delta":{"content":' if head.kind == "chat" else b',"text":'
        self._after_text = (b"}" if head.kind == "chat" else b"") + b',"logprobs":null,"finish_reason":null}]'

    def first(self, choices: int) -> bytes:
        """Opens the assistant's turn of every choice; completions have none."""
        if self._head.kind != "chat":
            return b""
        return b"".join(self._chunk(index, {"delta": {"role": "assistant", "content": ""}}) for index in range(choices))

    def text(self, index: int, text: str) -> bytes:
        return b"".join(
            (self._begin, b'{"index":%d' % index, self._before_text, _json(text), self._after_text, self._end)
        )

    def finish(self, index: int, end: Finished) -> bytes:
        return self._chunk(index, {"delta": {}} if self._head.kind == "chat" else {"text": ""}, end.reason)

    def usage(self, ends: Sequence[Finished]) -> bytes:
        return b"data: " + _json({**self._head.fields(self._object), "choices": [], "usage": usage(ends)}) + b"\n\n"

    def _chunk(self, index: int, content: dict[str, Any], reason: str | None = None) -> bytes:
        choice = _json({"index": index, **content, "logprobs": None, "finish_reason": reason})
        return self._begin + choice + b"]" + self._end
