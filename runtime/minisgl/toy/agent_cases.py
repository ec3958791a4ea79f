"""Cases that judge the agent model: each way to ask for a tool, in all circumstances."""

from __future__ import annotations

import random
from collections.abc import Iterator
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


def held_out_conversations(tokenizer: Tokenizer) -> Batch:
    """Return long conversations."""
    rows, row_tokens = _LONG
    return AgentRows(tokenizer, _SEED, row_tokens, held_out=True).batch(rows)


def all_forms(tokenizer: Tokenizer, values: int) -> list[Batch]:
    """Return each question in each format, with and without its tool and reasoning, and with `values` held-out values
    for each; then the answer to the result."""
    source = random.Random(_SEED + values)
    cases = [list(case) for _ in range(values) for case in _cases(source)]
    lengths = [sum(len(tokenizer.encode(segment.text).ids) for segment in case) for case in cases]
    order = sorted(range(len(cases)), key=lengths.__getitem__)
    chunks = [order[begin : begin + _BATCH] for begin in range(0, len(order), _BATCH)]
    return [collate(tokenizer, [cases[index] for index in chunk], lengths[chunk[-1]]) for chunk in chunks]


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
