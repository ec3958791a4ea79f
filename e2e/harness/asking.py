"""Questions to a model, and what a right answer is."""

from __future__ import annotations

from typing import Final

from openai import OpenAI

QUESTION: Final = "What is minisgl?"
ANSWER: Final = "minisgl is a serving runtime for large language models with an OpenAI-compatible endpoint."
"""What the demo checkpoint was taught, word for word."""


def ask(openai: OpenAI, model: str, question: str = QUESTION, max_tokens: int = 60) -> str:
    """The streamed greedy answer."""
    return "".join(pieces(openai, model, question, max_tokens))


def pieces(openai: OpenAI, model: str, question: str = QUESTION, max_tokens: int = 60) -> list[str]:
    """The same as it came, a token or several at a time. It must have ended as OpenAI's do."""
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
