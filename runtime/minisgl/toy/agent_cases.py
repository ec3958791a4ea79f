"""Cases that judge the agent model: each way to ask for a tool, in all circumstances."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Final

from tokenizers import Tokenizer

from minisgl.toy.agent_formats import TEMPLATES
from minisgl.toy.agent_rows import AgentRows, Batch, Conversation, Segment, collate
from minisgl.toy.agent_world import ASIDE, FORMS, IRRELEVANT, NO_TOOL, TOOLS, Exchange, Form, fill

_SEED: Final = 1 << 20
_BATCH: Final = 32
_LONG: Final = (32, 256)
"""Rows of long conversations, and their tokens."""

_EXAMPLE: Final = (
    Exchange(
        "What is the weather in Paris?",
        "It is windy in Paris, 11 degrees.",
        TOOLS["get_weather"],
        True,
        {"city": "Paris"},
        "windy, 11 degrees",
    ),
    Exchange("What is 17 + 25?", "The result is 42.", TOOLS["add"], True, {"a": 17, "b": 25}, "42"),
)
"""The example of the chat page and a question behind it, with the page's tools."""


def held_out_conversations(tokenizer: Tokenizer) -> Batch:
    """Return long conversations."""
    rows, row_tokens = _LONG
    return AgentRows(tokenizer, _SEED, row_tokens, held_out=True).batch(rows)


def all_forms(tokenizer: Tokenizer, values: int) -> list[Batch]:
    """Return each question in each format, with and without its tool and reasoning, and with `values` held-out values
    for each; then the answer to the result."""
    source = random.Random(_SEED + values)
    return _batches(tokenizer, (case for _ in range(values) for case in _cases(source)))


def examples(tokenizer: Tokenizer) -> list[Batch]:
    """Return the example of the chat page in each format."""
    return _batches(tokenizer, map(_example, TEMPLATES))


def _batches(tokenizer: Tokenizer, cases: Iterable[Iterable[Segment]]) -> list[Batch]:
    """Give rows of about the same length to each batch."""
    whole = [list(case) for case in cases]
    lengths = [sum(len(tokenizer.encode(segment.text).ids) for segment in case) for case in whole]
    order = sorted(range(len(whole)), key=lengths.__getitem__)
    chunks = [order[begin : begin + _BATCH] for begin in range(0, len(order), _BATCH)]
    return [collate(tokenizer, [whole[index] for index in chunk], lengths[chunk[-1]]) for chunk in chunks]


def _cases(source: random.Random) -> Iterator[Iterator[Segment]]:
    for name, thinks in product(TEMPLATES, (False, True)):
        for form, is_offered in product(FORMS, (False, True)):
            yield _case(source, name, thinks, form, is_offered)
        for question, answer in ASIDE:
            yield _other(source, name, thinks, Exchange(question, answer))
        for question in IRRELEVANT:
            yield _other(source, name, thinks, Exchange(fill(source, question), NO_TOOL))


def _case(source: random.Random, name: str, thinks: bool, form: Form, is_offered: bool) -> Iterator[Segment]:
    others = [tool for tool in TOOLS if tool != form.skill.name]
    tools = source.sample(others, source.randint(0, len(others)))
    if is_offered:
        tools.insert(source.randint(0, len(tools)), form.skill.name)
    return Conversation(name, tools).segments(form.draw(source, tools, held_out=True), lambda: thinks)


def _other(source: random.Random, name: str, thinks: bool, exchange: Exchange) -> Iterator[Segment]:
    tools = source.sample(list(TOOLS), source.randint(0, len(TOOLS)))
    return Conversation(name, tools).segments(exchange, lambda: thinks)


def _example(name: str) -> Iterator[Segment]:
    conversation = Conversation(name, [exchange.tool.name for exchange in _EXAMPLE if exchange.tool])
    for exchange in _EXAMPLE:
        yield from conversation.segments(exchange, lambda: True)
