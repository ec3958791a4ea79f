"""JSON of OpenAI's responses: full ones, and the events of a stream, of which everything but the text is rendered
once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from minisgl.frontend.errors import ApiError
from minisgl.frontend.generation.response_format import DONE, KEEPALIVE, error_event
from minisgl.frontend.openai.logprobs import chat_logprobs, completion_logprobs
from minisgl.frontend.openai.message_parts import full_tool_calls, reasoning_fields, streamed_tool_calls
from minisgl.frontend.server.response_stream import Delta
from minisgl.wire.text import Finished, ScoredToken

Kind = Literal["chat", "completion"]

_json = msgspec.json.encode


class OpenAIFormat(msgspec.Struct, frozen=True):
    """Response to a chat or a completion."""

    kind: Kind
    n: int = 1
    """Choices of each prompt."""
    scored: bool = False
    """Choices carry logprobs."""
    include_usage: bool = False
    """The last event of a stream is the usage."""
    continuous_usage: bool = False
    """So is a part of each other event."""
    named_tool: bool = False
    """The request names the tool to call, so an answer that calls it ends with `stop`, as in OpenAI's API."""
    reasoning: bool = True
    """Reasoning is part of the response."""
    prefix: str = ""
    """Text before that of each answer of a chat."""

    def full(self, response_id: str, model: str, choices: Sequence[Delta]) -> bytes:
        chat = self.kind == "chat"
        objects = [
            {
                "index": choice.index,
                **({"message": self.message(choice)} if chat else {"text": choice.text}),
                "logprobs": self.logprobs(choice.scored),
                "finish_reason": None if choice.finished is None else self.finish_reason(choice.finished),
            }
            for choice in choices
        ]
        ends = [choice.finished for choice in choices if choice.finished is not None]
        header = self.header(response_id, model, "chat.completion" if chat else "text_completion")
        return _json({**header, "choices": objects, "usage": self.usage(ends)})

    def message(self, choice: Delta) -> dict[str, Any]:
        """Return the message of a complete chat. `content` is null where the answer has nothing but tool calls."""
        content = self.prefix + choice.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasoning and self.reasoning:
            message |= reasoning_fields(choice.reasoning)
        if choice.tool_calls:
            message["content"] = content or None
            message["tool_calls"] = full_tool_calls(choice.tool_calls)
        return message

    def finish_reason(self, end: Finished) -> str:
        return "tool_calls" if end.reason == "stop" and end.tool_calls and not self.named_tool else end.reason

    def events(self, response_id: str, model: str, prompt_tokens: Sequence[int]) -> OpenAIEvents:
        return OpenAIEvents(self, response_id, model, prompt_tokens)

    def header(self, response_id: str, model: str, kind: str) -> dict[str, Any]:
        """Return the fields that a response, or every event of a stream, begins with."""
        prefix = "chatcmpl-" if self.kind == "chat" else "cmpl-"
        return {"id": prefix + response_id, "object": kind, "created": int(time.time()), "model": model}

    def logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        if not self.scored:
            return None
        return chat_logprobs(tokens) if self.kind == "chat" else completion_logprobs(tokens)

    def usage(self, ends: Sequence[Finished]) -> dict[str, Any]:
        """Return the usage of finished choices. A prompt counts once, for any n."""
        prompts = ends[:: self.n]
        prompt_tokens = sum(end.prompt_tokens for end in prompts)
        cached_tokens = sum(end.cached_tokens for end in prompts)
        usage = _token_counts(prompt_tokens, sum(end.completion_tokens for end in ends))
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
        if self.kind == "chat":
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(end.reasoning_tokens for end in ends)}
        return usage


def _token_counts(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class OpenAIEvents:
    """Server-sent events of one stream."""

    keepalive = KEEPALIVE

    def __init__(self, format: OpenAIFormat, response_id: str, model: str, prompt_tokens: Sequence[int]) -> None:
        """`prompt_tokens`: those of each choice's prompt."""
        chat = format.kind == "chat"
        self._format = format
        self._prompt_tokens = sum(prompt_tokens[:: format.n])
        self._tokens = [0] * len(prompt_tokens)
        self._header = format.header(response_id, model, "chat.completion.chunk" if chat else "text_completion")
        # {"id": …, "model": …} without its closing brace, then the one choice of the event.
        self._begin = b"data: " + _json(self._header)[:-1] + b',"choices":['
        before = b',"delta":{"content":' if chat else b',"text":'
        self._before_text = [self._begin + b'{"index":%d' % index + before for index in range(len(prompt_tokens))]
        self._end = (b',"usage":null}' if format.include_usage else b"}") + b"\n\n"
        self._brace = b"}" if chat else b""
        self._after_text = self._brace + b',"logprobs":null,"finish_reason":null}]' + self._end
        self._plain = not format.scored and not format.continuous_usage
        self.text_event: Callable[[str], bytes] | None = (
            self._text_event if self._plain and len(self._tokens) == 1 else None
        )

    @property
    def first(self) -> bytes:
        """Open the assistant's turn of every choice of a chat."""
        if self._format.kind != "chat":
            return b""
        delta = {"delta": {"role": "assistant", "content": self._format.prefix}}
        return b"".join(self._event(index, delta, None) for index in range(len(self._tokens)))

    def event(self, delta: Delta) -> bytes:
        """Render the new output of one choice: an event for each of its parts, and one for the end."""
        self._tokens[delta.index] = delta.tokens
        parts = []
        if delta.reasoning and self._format.reasoning:
            parts.append(self._event(delta.index, {"delta": reasoning_fields(delta.reasoning)}, None))
        if delta.text and self._plain:
            parts.append(self._text_event(delta.text, delta.index))
        elif delta.text or delta.scored:
            after = b',"logprobs":' + _json(self._format.logprobs(delta.scored)) + b',"finish_reason":null}]'
            parts.append(
                self._before_text[delta.index] + _json(delta.text) + self._brace + after + self._usage_so_far()
            )
        if delta.tool_calls:
            calls = streamed_tool_calls(delta.tool_calls)
            parts.append(self._event(delta.index, {"delta": {"tool_calls": calls}}, None))
        if delta.finished is not None:
            empty: dict[str, Any] = {"delta": {}} if self._format.kind == "chat" else {"text": ""}
            parts.append(self._event(delta.index, empty, self._format.finish_reason(delta.finished)))
        return b"".join(parts)

    def last(self, ends: Sequence[Finished]) -> bytes:
        """End a complete response."""
        if not self._format.include_usage:
            return DONE
        return b"data: " + _json({**self._header, "choices": [], "usage": self._format.usage(ends)}) + b"\n\n" + DONE

    def error(self, error: ApiError) -> bytes:
        return error_event(error)

    def _text_event(self, text: str, index: int = 0) -> bytes:
        """Render a text without logprobs, in a stream without continuous usage."""
        return self._before_text[index] + _json(text) + self._after_text

    def _event(self, index: int, content: dict[str, Any], reason: str | None) -> bytes:
        choice = _json({"index": index, **content, "logprobs": None, "finish_reason": reason})
        return self._begin + choice + b"]" + self._usage_so_far()

    def _usage_so_far(self) -> bytes:
        """Render the end of an event, with the usage so far if the client wants it."""
        if not self._format.continuous_usage:
            return self._end
        return b',"usage":' + _json(_token_counts(self._prompt_tokens, sum(self._tokens))) + b"}\n\n"
