"""Questions to a model, and the expected answers."""

from __future__ import annotations

from typing import Final

from openai import OpenAI

QUESTION: Final = "What is minisgl?"
ANSWER: Final = "minisgl is a serving runtime for large language models with an OpenAI-compatible endpoint."
"""Answer that the demo checkpoint was trained to give, word for word."""


def ask(openai: OpenAI, model: str, question: str = QUESTION, max_tokens: int = 60) -> str:
    """Ask with greedy sampling; returns the streamed answer."""
    return "".join(pieces(openai, model, question, max_tokens))


def pieces(openai: OpenAI, model: str, question: str = QUESTION, max_tokens: int = 60) -> list[str]:
    """Ask with greedy sampling; returns the texts of the streamed chunks, one or several tokens each. Checks that the
    stream ends with a finish reason."""
    found: list[str] = []
    reason = None
    stream = openai.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        stream=True,
        temperature=0,
        max_tokens=max_tokens,
    )
    for chunk in stream:
        choice = chunk.choices[0]
        found += [choice.delta.content] if choice.delta.content else []
        reason = choice.finish_reason or reason
    assert reason in ("stop", "length")
    return found
