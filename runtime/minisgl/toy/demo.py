"""A checkpoint with readable answers: a very small model, trained on this machine to answer questions about minisgl.

A correct answer shows that tokenizer, chat template, cache, attention and sampling work. The model is trained on
conversations of several questions, so that it also answers in the middle of a chat; typing errors in the questions make
it independent of their exact spelling.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer

from minisgl.models.config import ModelConfig
from minisgl.toy.demo_answers import DEMO_ANSWERS
from minisgl.toy.tiny import write_checkpoint
from minisgl.toy.tiny_tokenizer import FAMILIES, train_tokenizer
from minisgl.toy.training import Training, labels_of, one_thread, qwen3_config

STEPS: Final = 420

_FAMILY: Final = FAMILIES["qwen3"]
_MERGES: Final = 512
_VOCAB: Final = 256 + _MERGES + len(_FAMILY.control_tokens)
_ROWS: Final = 8
_ROW_TOKENS: Final = 192
_WARM_UP: Final = 40
_MISSPELT: Final = 0.35
"""Share of the questions that get a typing error or another small change."""


def write_demo_checkpoint(
    out: str | Path, *, seed: int = 0, steps: int = STEPS, progress: Callable[[int, float], None] | None = None
) -> Path:
    """Train the model, which takes about a minute on one core, and write a checkpoint directory; returns `out`.

    The same seed gives the same weights on the same machine. `progress` is called with each step and its loss. Raises
    ModelError `cannot_write`.
    """
    text = "".join(f"{question}\n{taught.answer}\n" for taught in DEMO_ANSWERS for question in taught.questions)
    tokenizer = train_tokenizer(_FAMILY, _VOCAB, text, _MERGES)
    config = qwen3_config(tokenizer, _FAMILY, intermediate=384, layers=3, kv_heads=2, head_dim=64)
    with one_thread():
        weights = _train(ModelConfig.parse(config), _TrainingRows(tokenizer, seed), seed, steps, progress)
    return write_checkpoint(Path(out), config, tokenizer, _FAMILY, weights)


class _TrainingRows:
    """Endless rows of training tokens, each the beginning of a conversation, with labels for the answers."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self._pairs = [(question, taught.answer) for taught in DEMO_ANSWERS for question in taught.questions]
        self._deck: list[tuple[str, str]] = []

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Next tokens and labels, both int64 [_ROWS, _ROW_TOKENS]; a label is the token that follows, or IGNORED."""
        rows = [self._row() for _ in range(_ROWS)]
        return torch.tensor([tokens for tokens, _ in rows]), torch.tensor([labels for _, labels in rows])

    def _row(self) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        learned: list[bool] = []
        while len(tokens) <= _ROW_TOKENS:
            question, answer = self._draw()
            before = self._encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
            target = self._encode(f"{answer}<|im_end|>")
            after = self._encode("\n")
            tokens += [*before, *target, *after]
            learned += [False] * len(before) + [True] * len(target) + [False] * len(after)
        return tokens[:_ROW_TOKENS], labels_of(tokens, learned)[:_ROW_TOKENS]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _draw(self) -> tuple[str, str]:
        """Draw a question with its answer; each question is used once before any is repeated."""
        if not self._deck:
            self._deck = self._random.sample(self._pairs, len(self._pairs))
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


def _train(
    config: ModelConfig,
    rows: _TrainingRows,
    seed: int,
    steps: int,
    progress: Callable[[int, float], None] | None,
) -> dict[str, torch.Tensor]:
    """Train the model; returns bfloat16 weights by their names in a checkpoint."""
    training = Training(config, seed, _ROW_TOKENS)
    for step in range(steps):
        loss = training.step(*rows.batch(), _schedule(step, steps))
        if progress is not None:
            progress(step + 1, loss)
    return training.weights()


def _schedule(step: int, steps: int) -> float:
    """Factor of the learning rate at a step: linear warm-up, then cosine decay to 2 %."""
    rise = min(1.0, (step + 1) / _WARM_UP)
    return rise * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
