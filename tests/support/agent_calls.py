"""Generated cases of function calls in the manner of the Berkeley Function Calling Leaderboard."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from minisgl.toy.agent_world import FORMS, IRRELEVANT, TOOLS, fill

Category = Literal["simple", "multiple", "irrelevance"]


class Case(NamedTuple):
    category: Category
    question: str
    tools: tuple[str, ...]
    call: tuple[str, Mapping[str, Any]] | None
    """Name and arguments; None if nothing is to be called."""
    needed: str | None
    """The tool that the question needs, also if it is missing."""


def generated_cases(seed: int) -> list[Case]:
    """Return three cases for each way to ask for a tool, with values that are not trained: with this tool alone, with
    this and others, and with others; and the questions that no tool answers."""
    source = random.Random(seed)
    made = []
    for form in FORMS:
        needed = form.skill.name
        others = [tool for tool in TOOLS if tool != needed]
        several = source.sample(others, source.randint(1, len(others)))
        several.insert(source.randint(0, len(several)), needed)
        offers: list[tuple[Category, list[str]]] = [
            ("simple", [needed]),
            ("multiple", several),
            ("irrelevance", source.sample(others, source.randint(0, len(others)))),
        ]
        for category, tools in offers:
            exchange = form.draw(source, tools, held_out=True)
            call = (needed, exchange.arguments) if exchange.is_offered else None
            made.append(Case(category, exchange.question, tuple(tools), call, needed))
    for question in IRRELEVANT:
        tools = source.sample(list(TOOLS), source.randint(1, len(TOOLS)))
        made.append(Case("irrelevance", fill(source, question), tuple(tools), None, None))
    return made
