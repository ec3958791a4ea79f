"""The JSON of OpenAI's answers: whole ones, and the chunks of a stream, of which everything but the text is rendered
once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from minisgl.frontend.openai.token_scores import chat_scores, completion_scores
from minisgl.frontend.server.response_stream import Delta
from minisgl.wire.text import Finished, ScoredToken

Kind = Literal["chat", "completion"]

_json = msgspec.json.encode

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


class Head:
    """What every part of one answer repeats."""

    def __init__(self, kind: Kind, answer_id: str, model: str) -> None:
        self.kind: Kind = kind
        self.id = ("chatcmpl-" if kind == "chat" else "cmpl-") + answer_id
        self.created = int(time.time())
        self.model = model

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class Choice(msgspec.Struct):
    """One choice of an answer that is complete."""

    text: str
    scored: Sequence[ScoredToken]
    finished: Finished


def whole(head: Head, choices: Sequence[Choice], n: int, *, scored: bool) -> bytes:
    """The answer of a request that did not ask for a stream. `scored`: it asked for log-probabilities."""
    objects = [
        {
            "index": index,
            **(
                {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
                if head.kind == "chat"
                else {"text": choice.text}
            ),
            "logprobs": _scores(head.kind, choice.scored) if scored else None,
            "finish_reason": choice.finished.reason,
        }
        for index, choice in enumerate(choices)
    ]
    kind = "chat.completion" if head.kind == "chat" else "text_completion"
    ends = [choice.finished for choice in choices]
    return _json({**head.fields(kind), "choices": objects, "usage": usage(ends, n)})


def usage(ends: Sequence[Finished], n: int) -> dict[str, Any]:
    """Of n choices for each prompt; the prompt counts once."""
    prompts = ends[::n]
    return _usage(
        sum(end.prompt_tokens for end in prompts),
        sum(end.completion_tokens for end in ends),
        sum(end.cached_tokens for end in prompts),
    )


def _usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Chunks:
    """Server-sent events of one stream."""

    def __init__(
        self,
        head: Head,
        prompt_tokens: Sequence[int],
        n: int,
        *,
        scored: bool = False,
        include_usage: bool = False,
        continuous_usage: bool = False,
    ) -> None:
        """`prompt_tokens`: of each choice, of which there are n for each prompt. `scored`: chunks carry
        log-probabilities."""
        chat = head.kind == "chat"
        self._head = head
        self._choices = len(prompt_tokens)
        self._n = n
        self._scored = scored
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._prompt_tokens = sum(prompt_tokens[::n])
        self._tokens = [0] * self._choices
        self._object = "chat.completion.chunk" if chat else "text_completion"
        # {"id": …, "model": …} without its closing brace, then the one choice of the chunk.
        self._begin = b"data: " + _json(head.fields(self._object))[:-1] + b',"choices":['
        before = b',"delta":{"content":' if chat else b',"text":'
        self._before_text = [self._begin + b'{"index":%d' % index + before for index in range(self._choices)]
        self._end = (b',"usage":null}' if include_usage else b"}") + b"\n\n"
        self._brace = b"}" if chat else b""
        self._after_text = self._brace + b',"logprobs":null,"finish_reason":null}]' + self._end
        self._plain = not scored and not continuous_usage
        self.only_texts = self._plain and self._choices == 1
        """Until its end, an answer is made of nothing but what `text_event` gives."""

    def first(self) -> bytes:
        """Opens the assistant's turn of every choice; completions have none."""
        if self._head.kind != "chat":
            return b""
        delta = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._chunk(index, delta, None) for index in range(self._choices))

    def event(self, news: Delta) -> bytes:
        """What is new of one choice; nothing where there is nothing to say."""
        self._tokens[news.choice] = news.tokens
        parts = []
        if news.text and self._plain:
            parts.append(self.text_event(news.text, news.choice))
        elif news.text or news.scored:
            scores = _json(_scores(self._head.kind, news.scored)) if self._scored else b"null"
            after = b',"logprobs":' + scores + b',"finish_reason":null}]' + self._end_now()
            parts.append(self._before_text[news.choice] + _json(news.text) + self._brace + after)
        if news.finished is not None:
            empty: dict[str, Any] = {"delta": {}} if self._head.kind == "chat" else {"text": ""}
            parts.append(self._chunk(news.choice, empty, news.finished.reason))
        return b"".join(parts)

    def text_event(self, text: str, choice: int = 0) -> bytes:
        """A text without scores, in a stream without running usage."""
        return self._before_text[choice] + _json(text) + self._after_text

    def last(self, ends: Sequence[Finished]) -> bytes:
        """The end of a whole answer."""
        if not self._include_usage:
            return DONE
        end = {**self._head.fields(self._object), "choices": [], "usage": usage(ends, self._n)}
        return b"data: " + _json(end) + b"\n\n" + DONE

    def _chunk(self, index: int, content: dict[str, Any], reason: str | None) -> bytes:
        choice = _json({"index": index, **content, "logprobs": None, "finish_reason": reason})
        return self._begin + choice + b"]" + self._end_now()

    def _end_now(self) -> bytes:
        if not self._continuous_usage:
            return self._end
        completion = sum(self._tokens)
        so_far = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
        }
        return b',"usage":' + _json(so_far) + b"}\n\n"


def _scores(kind: Kind, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    return chat_scores(tokens) if kind == "chat" else completion_scores(tokens)
