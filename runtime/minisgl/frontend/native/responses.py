"""Responses of /generate: JSON with `text`, `output_ids` and `meta_info`, or plain text as server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from minisgl.frontend.errors import ApiError
from minisgl.frontend.generation.response_format import DONE, KEEPALIVE, EventFormat, error_event, event_json
from minisgl.frontend.native.logprobs import Lists
from minisgl.frontend.server.response_stream import Delta
from minisgl.wire.text import Finished

_json = msgspec.json.encode


class _Progress:
    """Output of one choice so far. `lists`: None without log-probabilities."""

    def __init__(self, prompt_tokens: int, lists: Lists | None, logprob_start: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.text = ""
        self.tokens = 0
        self.token_ids: list[int] = []
        self.lists = lists
        self.finished: Finished | None = None
        self._skipped = logprob_start
        """Tokens of the prompt that are still to be left out; negative: all."""

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens = delta.tokens
        self.token_ids += delta.token_ids
        self.finished = delta.finished
        if self.lists is None:
            return
        if self._skipped >= 0:
            self.lists.add("input", delta.prompt_scored[self._skipped :])
            self._skipped = max(self._skipped - len(delta.prompt_scored), 0)
        self.lists.add("output", delta.scored)


class NativeFormat(msgspec.Struct, frozen=True):
    """Response to /generate."""

    is_list: bool = False
    """The request has several prompts or choices, so the response is a list."""
    text_only: bool = False
    """The events of a stream are plain text."""
    request_id: str = ""
    """Identifier that the client has given; empty: ours is used."""
    logprobs: int | None = None
    """Number of most likely tokens that are reported beside each token; None: no log-probabilities."""
    named_tokens: bool = False
    """Tokens that the request names are reported in place of the most likely ones."""
    logprob_start: int = -1
    """First token of the prompt with a log-probability; −1: none."""
    texts_in_logprobs: bool = False
    """Tokens in lists of log-probabilities have their texts."""

    def full(self, response_id: str, model: str, choices: Sequence[Delta]) -> bytes:
        objects = []
        for choice in choices:
            progress = self.progress(0)
            progress.add(choice)
            objects.append(self.choice(response_id, choice.index, progress))
        return _json(objects if self.is_list else objects[0])

    def events(self, response_id: str, model: str, prompt_tokens: Sequence[int]) -> EventFormat:
        return TextEvents() if self.text_only else NativeEvents(self, response_id, prompt_tokens)

    def progress(self, prompt_tokens: int) -> _Progress:
        """Return a choice without output, with a prompt of `prompt_tokens` tokens."""
        tops = "token_ids" if self.named_tokens else "top" if self.logprobs else ""
        lists = None if self.logprobs is None else Lists(tops, self.texts_in_logprobs)
        return _Progress(prompt_tokens, lists, self.logprob_start)

    def choice(self, response_id: str, index: int, progress: _Progress) -> dict[str, Any]:
        """Return the object of one choice, finished or not."""
        meta = self._meta_info(response_id, index, progress)
        return {"text": progress.text, "output_ids": progress.token_ids, "meta_info": meta}

    def _meta_info(self, response_id: str, index: int, progress: _Progress) -> dict[str, Any]:
        own_id = self.request_id or response_id
        info: dict[str, Any] = {"id": f"{own_id}-{index}" if self.is_list else own_id}
        end = progress.finished
        if end is None:
            info |= {
                "finish_reason": None,
                "prompt_tokens": progress.prompt_tokens,
                "completion_tokens": progress.tokens,
            }
        else:
            info |= {
                "finish_reason": _finish_reason(end, progress.token_ids),
                "prompt_tokens": end.prompt_tokens,
                "completion_tokens": end.completion_tokens,
                "cached_tokens": end.cached_tokens,
            }
        return info if progress.lists is None else info | progress.lists.fields


def _finish_reason(end: Finished, token_ids: Sequence[int]) -> dict[str, Any]:
    if end.reason == "length":
        return {"type": "length", "length": end.completion_tokens}
    if end.matched_stop is not None or not token_ids:
        return {"type": "stop", "matched": end.matched_stop}
    # The model's own end: its token.
    return {"type": "stop", "matched": token_ids[-1]}


class NativeEvents:
    """Server-sent events, each with the whole output so far."""

    first = b""
    text_event = None
    keepalive = KEEPALIVE

    def __init__(self, format: NativeFormat, response_id: str, prompt_tokens: Sequence[int]) -> None:
        """`prompt_tokens`: those of each choice's prompt."""
        self._format = format
        self._id = response_id
        self._choices = [format.progress(tokens) for tokens in prompt_tokens]

    def event(self, delta: Delta) -> bytes:
        progress = self._choices[delta.index]
        progress.add(delta)
        event = self._format.choice(self._id, delta.index, progress)
        if self._format.is_list:
            event["index"] = delta.index
        return b"data: " + event_json(event) + b"\n\n"

    def last(self, ends: Sequence[Finished]) -> bytes:
        return DONE

    def error(self, error: ApiError) -> bytes:
        return error_event(error)


class TextEvents:
    """Server-sent events, each with new text. A line break in it begins another `data:` line, as the standard of
    server-sent events requires."""

    first = b""
    text_event = None
    keepalive = KEEPALIVE

    def event(self, delta: Delta) -> bytes:
        if not delta.text:
            return b""
        return b"".join(b"data: %s\n" % line.encode() for line in delta.text.split("\n")) + b"\n"

    def last(self, ends: Sequence[Finished]) -> bytes:
        return DONE

    def error(self, error: ApiError) -> bytes:
        return error_event(error)
