"""Training rows of the agent model: conversations as its chat templates write them, in all formats."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from tokenizers import Tokenizer

from minisgl.tokenizer.compiled_template import CompiledTemplate
from minisgl.toy.agent_formats import TEMPLATES
from minisgl.toy.agent_world import NO_TOOL, RESULT_THOUGHT, TOOLS, Exchange, draw, thought
from minisgl.toy.training import IGNORED, labels_of

_WITHOUT_TOOLS: Final = 0.08
_WITH_SYSTEM: Final = 0.2
_SYSTEM: Final = ("You are helpful.", "Be brief.", "You are a helpful assistant.")
_THINKS: Final = 0.5
"""Share of answers that think: it is easier than to answer at once."""
_SAME_THINKING: Final = 0.7
"""Share of answers to results that think exactly if the calls before them did. Clients need not send reasoning back."""


class Segment(NamedTuple):
    """A part of a conversation's text."""

    text: str
    kind: str = ""
    """What the model writes here, for reports; empty: the text is part of a prompt."""


class Turn(NamedTuple):
    """An answer in a row, by the positions that predict its tokens."""

    kind: str
    row: int
    begin: int
    end: int


class Batch(NamedTuple):
    tokens: torch.Tensor
    """int64 [rows, row_tokens]"""
    labels: torch.Tensor
    """The token that follows in an answer, or IGNORED; like `tokens`."""
    turns: list[Turn]
    """Answers that are complete."""


class AgentRows:
    """Endless batches of conversations."""

    def __init__(self, tokenizer: Tokenizer, seed: int, row_tokens: int, *, held_out: bool = False) -> None:
        """With `held_out`, only held-out questions need a tool; otherwise none of them."""
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self._row_tokens = row_tokens
        self._held_out = held_out

    def batch(self, rows: int) -> Batch:
        drawn = (conversation(self._random, held_out=self._held_out) for _ in range(rows))
        return collate(self._tokenizer, drawn, self._row_tokens)


def collate(tokenizer: Tokenizer, conversations: Iterable[Iterable[Segment]], row_tokens: int) -> Batch:
    """Give each conversation a row, in which it is cut off or padded."""
    tokens: list[list[int]] = []
    labels: list[list[int]] = []
    turns: list[Turn] = []
    for row, segments in enumerate(conversations):
        ids: list[int] = []
        learned: list[bool] = []
        for segment in segments:
            begin = len(ids)
            ids += tokenizer.encode(segment.text, add_special_tokens=False).ids
            learned += [bool(segment.kind)] * (len(ids) - begin)
            if len(ids) > row_tokens:
                break
            if segment.kind:
                turns.append(Turn(segment.kind, row, begin - 1, len(ids) - 1))
        following = labels_of(ids, learned)
        missing = max(0, row_tokens - len(ids))
        tokens.append(ids[:row_tokens] + [0] * missing)
        labels.append(following[:row_tokens] + [IGNORED] * (row_tokens - min(row_tokens, len(following))))
    return Batch(torch.tensor(tokens), torch.tensor(labels), turns)


class Conversation:
    """A conversation in one format."""

    def __init__(self, name: str, offered: Sequence[str], system: str = "") -> None:
        """`name` is that of the format; `offered` are the tools."""
        self._name = name
        self._template = _COMPILED[name]
        self._definitions = [TOOLS[tool].definition for tool in offered] or None
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self._written = ""

    def segments(self, exchange: Exchange, thinks: Callable[[], bool]) -> Iterator[Segment]:
        """Go on with an exchange: prompts and answers in turn. `thinks` is called for each answer."""
        self._messages.append({"role": "user", "content": exchange.question})
        kind = "aside"
        if exchange.tool is not None:
            kind = exchange.tool.name if exchange.is_offered else f"no {exchange.tool.name}"
        elif exchange.answer == NO_TOOL:
            kind = "no tool"
        reasoning = thought(exchange)
        if exchange.tool is not None and exchange.is_offered:
            call = {"type": "function", "function": {"name": exchange.tool.name, "arguments": dict(exchange.arguments)}}
            yield from self._answer({"content": "", "tool_calls": [call]}, reasoning, kind, thinks())
            self._messages.append({"role": "tool", "content": exchange.result})
            reasoning, kind = RESULT_THOUGHT, f"{kind} result"
        yield from self._answer({"content": exchange.answer}, reasoning, kind, thinks())

    def _answer(self, message: dict[str, Any], reasoning: str, kind: str, thinks: bool) -> Iterator[Segment]:
        context = {"messages": self._messages, "tools": self._definitions}
        prompt = self._template.render({**context, "add_generation_prompt": True, "enable_thinking": thinks})
        self._messages.append({"role": "assistant", **message, **({"reasoning_content": reasoning} if thinks else {})})
        text = self._template.render(context).removesuffix("\n")
        assert prompt.startswith(self._written) and text.startswith(prompt)
        yield Segment(prompt[len(self._written) :])
        yield Segment(text[len(prompt) :], f"{self._name} {kind}{', thinking' if thinks else ''}")
        self._written = text


def conversation(source: random.Random, *, held_out: bool) -> Iterator[Segment]:
    """Iterate over an endless conversation in one format, prompts and answers in turn."""
    name = source.choice(list(_COMPILED))
    offered = source.sample(list(TOOLS), source.randint(1, len(TOOLS))) if source.random() > _WITHOUT_TOOLS else []
    drawn = Conversation(name, offered, source.choice(_SYSTEM) if source.random() < _WITH_SYSTEM else "")
    while True:
        thinking = _Thinking(source)
        yield from drawn.segments(draw(source, offered, held_out=held_out), thinking.draw)


class _Thinking:
    """Draws which answers to a question think."""

    def __init__(self, source: random.Random) -> None:
        self._source = source
        self._last: bool | None = None

    def draw(self) -> bool:
        if self._last is None:
            self._last = self._source.random() < _THINKS
        elif self._source.random() > _SAME_THINKING:
            self._last = not self._last
        return self._last


_COMPILED: Final = {name: CompiledTemplate(template) for name, template in TEMPLATES.items()}
