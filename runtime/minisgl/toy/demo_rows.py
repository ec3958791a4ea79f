"""Training rows of the demo model, and the conversations that judge it."""

from __future__ import annotations

import random
from typing import Final

import torch
from tokenizers import Tokenizer

from minisgl.toy.demo_answers import DEMO_ANSWERS
from minisgl.toy.training import IGNORED, labels_of

ROW_TOKENS: Final = 192
_ROWS: Final = 8
_MISSPELT: Final = 0.35
"""Share of the questions that get a typing error or another small change."""
_PAIRS: Final = tuple((question, taught.answer) for taught in DEMO_ANSWERS for question in taught.questions)
CONVERSATIONS: Final = tuple(zip(_PAIRS, _PAIRS[len(_PAIRS) // 2 :] + _PAIRS[: len(_PAIRS) // 2], strict=True))
"""Two questions with their answers: each taught question, as it is spelled, is once the first and once the second."""


class DemoRows:
    """Endless rows of training tokens, each the beginning of a conversation, with labels for the answers."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self._deck: list[tuple[str, str]] = []

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Next tokens and labels, both int64 [_ROWS, ROW_TOKENS]; a label is the token that follows, or IGNORED."""
        rows = [self._row() for _ in range(_ROWS)]
        return torch.tensor([tokens for tokens, _ in rows]), torch.tensor([labels for _, labels in rows])

    def _row(self) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        learned: list[bool] = []
        while len(tokens) <= ROW_TOKENS:
            exchange = _exchange(self._tokenizer, *self._draw())
            tokens += exchange[0]
            learned += exchange[1]
        return tokens[:ROW_TOKENS], labels_of(tokens, learned)[:ROW_TOKENS]

    def _draw(self) -> tuple[str, str]:
        """Draw a question with its answer; each question is used once before any is repeated."""
        if not self._deck:
            self._deck = self._random.sample(_PAIRS, len(_PAIRS))
        question, answer = self._deck.pop()
        return (self._misspell(question) if self._random.random() < _MISSPELT else question), answer

    def _misspell(self, question: str) -> str:
        change = self._random.randrange(6)
        at = self._random.randrange(len(question) - 1)
        if change == 0:
            return question.lower()
        if change == 1:
            return question.rstrip("?")
        if change == 2:
            return question.lower().rstrip("?")
        if change == 3:
            return question[:at] + question[at + 1 :]
        if change == 4:
            return question[:at] + question[at + 1] + question[at] + question[at + 2 :]
        return self._random.choice(("Please: ", "Hey, ", "So, ", "Tell me: ")) + question


def judged_rows(tokenizer: Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels of the conversations that judge the model, both int64 [conversations, tokens]."""
    tokens: list[list[int]] = []
    labels: list[list[int]] = []
    for exchanges in CONVERSATIONS:
        (first, answered), (second, answering) = (_exchange(tokenizer, *exchange) for exchange in exchanges)
        tokens.append(first + second)
        labels.append(labels_of(first + second, answered + answering))
    longest = max(map(len, tokens))
    assert longest <= ROW_TOKENS
    return (
        torch.tensor([row + [0] * (longest - len(row)) for row in tokens]),
        torch.tensor([row + [IGNORED] * (longest - len(row)) for row in labels]),
    )


def _exchange(tokenizer: Tokenizer, question: str, answer: str) -> tuple[list[int], list[bool]]:
    """Return the tokens of a question and its answer, and which of them are learned."""
    parts = (f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", f"{answer}<|im_end|>", "\n")
    before, target, after = (tokenizer.encode(part, add_special_tokens=False).ids for part in parts)
    return [*before, *target, *after], [False] * len(before) + [True] * len(target) + [False] * len(after)
