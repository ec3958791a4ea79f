"""JSON of OpenAI's responses: full ones, and the events of a stream, of which everything but the text is rendered
once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from minisgl.frontend.errors import ApiError
from minisgl.frontend.generation.functions import are_complete
from minisgl.frontend.generation.response_format import DONE, KEEPALIVE, error_event, event_json
from minisgl.frontend.openai.logprobs import chat_logprobs, completion_logprobs
from minisgl.frontend.openai.message_parts import full_tool_calls, join_pieces, reasoning_fields, streamed_tool_calls
from minisgl.frontend.openai.token_fields import before_named, cut_tops, prompt_logprobs, stop_fields
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
    echoes: Sequence[str] = ()
    """Text before the answers to each prompt of a chat; empty: none."""
    token_ids: bool = False
    """Choices have the ids of their tokens, and the response those of the prompt."""
    tokens_as_ids: bool = False
    """`logprobs` name tokens by their ids."""
    tops: int | None = None
    """Number of most likely tokens in `logprobs`; None: all that were reported."""
    named_tokens: bool = False
    """`logprobs` have tokens that the request names in place of the most likely ones."""
    prompt_tops: int | None = None
    """Number of most likely tokens in `prompt_logprobs`; None: there are no log-probabilities of prompts."""
    predicted: bool = False
    """The usage counts accepted and rejected tokens of predictions."""

    def full(self, response_id: str, model: str, choices: Sequence[Delta]) -> bytes:
        chat = self.kind == "chat"
        objects = [
            {
                "index": choice.index,
                **({"message": self.message(choice)} if chat else {"text": choice.text}),
                "logprobs": self.logprobs(choice.scored),
                "finish_reason": None if choice.finished is None else self.full_finish_reason(choice, choice.finished),
                **stop_fields(choice.finished),
                "token_ids": choice.token_ids if self.token_ids else None,
                **({} if chat and len(choices) == self.n else self.prompt_fields(choice)),
            }
            for choice in choices
        ]
        ends = [choice.finished for choice in choices if choice.finished is not None]
        header = self.header(response_id, model, "chat.completion" if chat else "text_completion")
        # A batch of chats has several prompts, as completions have.
        prompt = self.prompt_fields(choices[0]) if chat and len(choices) == self.n else {}
        return _json({**header, "choices": objects, "usage": self.usage(ends), **prompt})

    def prompt_fields(self, choice: Delta) -> dict[str, Any]:
        """Return the fields about the prompt of a whole choice."""
        return {
            "prompt_logprobs": None if self.prompt_tops is None else prompt_logprobs(choice, self.prompt_tops),
            "prompt_token_ids": choice.prompt_token_ids if self.token_ids else None,
        }

    def message(self, choice: Delta) -> dict[str, Any]:
        """Return the message of a complete chat. `content` is null where the answer has nothing but tool calls."""
        content = self.echo(choice.index) + choice.text
        reasoning = choice.reasoning if self.reasoning else ""
        message = {"role": "assistant", "content": content, "refusal": None, **reasoning_fields(reasoning or None)}
        if choice.tool_calls:
            message["content"] = content or None
            message["tool_calls"] = full_tool_calls(choice.tool_calls)
        return message

    def echo(self, choice: int) -> str:
        """Return the text before the answer of a choice."""
        return self.echoes[choice // self.n] if self.echoes else ""

    def full_finish_reason(self, choice: Delta, end: Finished) -> str:
        """Return the finish reason of a whole choice."""
        return self.finish_reason(end, join_pieces(choice.tool_calls)[-1].arguments if choice.tool_calls else "")

    def finish_reason(self, end: Finished, arguments: str) -> str:
        """`arguments`: those of the last call. A call that a stop string or token has cut off is none to make."""
        if end.reason != "stop" or not end.tool_calls or self.named_tool:
            return end.reason
        return "tool_calls" if end.matched_stop is None or are_complete(arguments) else "stop"

    def events(self, response_id: str, model: str, prompt_tokens: Sequence[int]) -> OpenAIEvents:
        return OpenAIEvents(self, response_id, model, prompt_tokens)

    def header(self, response_id: str, model: str, kind: str) -> dict[str, Any]:
        """Return the fields that a response, or every event of a stream, begins with."""
        prefix = "chatcmpl-" if self.kind == "chat" else "cmpl-"
        return {"id": prefix + response_id, "object": kind, "created": int(time.time()), "model": model}

    def logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        if not self.scored:
            return None
        tokens = [*map(before_named, tokens)] if self.named_tokens else cut_tops(tokens, self.tops)
        if self.kind == "chat":
            return chat_logprobs(tokens, self.tokens_as_ids)
        return completion_logprobs(tokens, self.tokens_as_ids)

    def usage(self, ends: Sequence[Finished]) -> dict[str, Any]:
        """Return the usage of finished choices. A prompt counts once, for any n."""
        prompts = ends[:: self.n]
        prompt_tokens = sum(end.prompt_tokens for end in prompts)
        cached_tokens = sum(end.cached_tokens for end in prompts)
        usage = _token_counts(prompt_tokens, sum(end.completion_tokens for end in ends))
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
        if self.kind == "chat":
            reasoning_tokens = sum(end.reasoning_tokens for end in ends)
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens, **self._predicted(ends)}
            # Clients of SGLang read it here.
            usage["reasoning_tokens"] = reasoning_tokens
        return usage

    def _predicted(self, ends: Sequence[Finished]) -> dict[str, int]:
        if not self.predicted:
            return {}
        return {
            "accepted_prediction_tokens": sum(end.accepted_prediction_tokens for end in ends),
            "rejected_prediction_tokens": sum(end.rejected_prediction_tokens for end in ends),
        }


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
        self._opened: set[int] = set()
        """Choices whose first event was sent, where that waits for token ids."""
        self._arguments: dict[int, list[str]] = {}
        """Arguments of the last call of each choice, in pieces."""
        self._none: dict[str, Any] = {"token_ids": ()} if format.token_ids else {}
        """Token ids of an event that has no new ones."""
        self._header = format.header(response_id, model, "chat.completion.chunk" if chat else "text_completion")
        # {"id": …, "model": …} without its closing brace, then the one choice of the event.
        self._begin = b"data: " + event_json(self._header)[:-1] + b',"choices":['
        before = b',"delta":{"content":' if chat else b',"text":'
        self._before_text = [self._begin + b'{"index":%d' % index + before for index in range(len(prompt_tokens))]
        self._end = (b',"usage":null}' if format.include_usage else b"}") + b"\n\n"
        self._brace = b"}" if chat else b""
        self._after_text = self._brace + b',"logprobs":null,"finish_reason":null}]' + self._end
        self._plain = not format.scored and not format.continuous_usage and not format.token_ids
        self.text_event: Callable[[str], bytes] | None = (
            self._text_event if self._plain and len(self._tokens) == 1 else None
        )

    @property
    def first(self) -> bytes:
        """Open the assistant's turn of every choice of a chat. With token ids, that waits for those of the prompt."""
        if self._format.kind != "chat" or self._format.token_ids:
            return b""
        return b"".join(self._open(index) for index in range(len(self._tokens)))

    def event(self, delta: Delta) -> bytes:
        """Render the new output of one choice: an event for each of its parts, and one for the end."""
        self._tokens[delta.index] = delta.tokens
        if self._plain and delta.text and delta.finished is None and not delta.reasoning and not delta.tool_calls:
            return self._text_event(delta.text, delta.index)
        ids = self._new_ids(delta)
        parts = [self._open_with_ids(delta)]
        for content, reason, more in self._contents(delta, has_ids=bool(ids)):
            parts.append(self._event(delta.index, content, reason, more=more | (ids or self._none)))
            ids = {}
        return b"".join(parts)

    def last(self, ends: Sequence[Finished]) -> bytes:
        """End a complete response."""
        if not self._format.include_usage:
            return DONE
        usage = event_json({**self._header, "choices": [], "usage": self._format.usage(ends)})
        return b"data: " + usage + b"\n\n" + DONE

    def error(self, error: ApiError) -> bytes:
        return error_event(error)

    def _text_event(self, text: str, index: int = 0) -> bytes:
        """Render a text without logprobs, in a stream without continuous usage."""
        return self._before_text[index] + event_json(text) + self._after_text

    def _contents(self, delta: Delta, has_ids: bool) -> Iterator[tuple[dict[str, Any], str | None, dict[str, Any]]]:
        """Yield content, finish reason and other fields of each event."""
        chat = self._format.kind == "chat"
        empty: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
        shows_reasoning = bool(delta.reasoning) and self._format.reasoning
        if shows_reasoning:
            yield {"delta": reasoning_fields(delta.reasoning)}, None, {}
        content: dict[str, Any] = {"delta": {"content": delta.text}} if chat else {"text": delta.text}
        content["logprobs"] = self._format.logprobs(delta.scored)
        if delta.finished is not None and not chat and self._format.scored:
            # Clients of completions read log-probabilities in each event, also in the last one of a choice.
            yield content, self._format.finish_reason(delta.finished, ""), stop_fields(delta.finished)
            return
        if delta.text or delta.scored:
            yield content, None, {}
        for piece in delta.tool_calls:
            if piece.id:
                self._arguments[delta.index] = []
            self._arguments[delta.index].append(piece.arguments)
        if delta.tool_calls:
            yield {"delta": {"tool_calls": streamed_tool_calls(delta.tool_calls)}}, None, {}
        if delta.finished is not None:
            arguments = "".join(self._arguments.get(delta.index, ()))
            yield empty, self._format.finish_reason(delta.finished, arguments), stop_fields(delta.finished)
        elif has_ids and not (shows_reasoning or delta.text or delta.scored or delta.tool_calls):
            yield empty, None, {}

    def _open(self, index: int, header: dict[str, Any] | None = None) -> bytes:
        """Render the event that opens the assistant's turn."""
        delta = {"role": "assistant", "content": self._format.echo(index)}
        return self._event(index, {"delta": delta}, None, more=self._none, header=header)

    def _open_with_ids(self, delta: Delta) -> bytes:
        """Open a choice of a chat with token ids, once. The first one of a prompt has those of the prompt: in chats
        they are not part of a choice."""
        if not self._format.token_ids or self._format.kind != "chat" or delta.index in self._opened:
            return b""
        is_first = not any(delta.index // self._format.n == index // self._format.n for index in self._opened)
        self._opened.add(delta.index)
        return self._open(
            delta.index, self._header | {"prompt_token_ids": delta.prompt_token_ids} if is_first else None
        )

    def _new_ids(self, delta: Delta) -> dict[str, Any]:
        """Return fields with new token ids, whose text may be part of a later event."""
        ids: dict[str, Any] = {}
        if self._format.token_ids and delta.token_ids:
            ids["token_ids"] = delta.token_ids
        if self._format.token_ids and delta.prompt_token_ids and self._format.kind != "chat":
            ids = self._none | ids | {"prompt_token_ids": delta.prompt_token_ids}
        return ids

    def _event(
        self,
        index: int,
        content: dict[str, Any],
        reason: str | None,
        *,
        more: dict[str, Any] | None = None,
        header: dict[str, Any] | None = None,
    ) -> bytes:
        """Render an event of one choice. `more`: fields behind the others; `header`: in place of the usual one."""
        logprobs = content.get("logprobs")
        if logprobs is None and self._format.token_ids:
            # Clients that read ids read the log-probabilities of each event, too.
            logprobs = self._format.logprobs(())
        choice = event_json({"index": index, **content, "logprobs": logprobs, "finish_reason": reason, **(more or {})})
        begin = self._begin if header is None else b"data: " + event_json(header)[:-1] + b',"choices":['
        return begin + choice + b"]" + self._usage_so_far()

    def _usage_so_far(self) -> bytes:
        """Render the end of an event, with the usage so far if the client wants it."""
        if not self._format.continuous_usage:
            return self._end
        return b',"usage":' + event_json(_token_counts(self._prompt_tokens, sum(self._tokens))) + b"}\n\n"
