"""Answers of Hugging Face transformers, the reference for our numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from support.numerics.workload import ANSWER, Ask

TOLERANCE: Final = 1e-4
"""Largest difference of a logit that counts as equal."""


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logits: torch.Tensor
    """[tokens, vocab] float32: the logits from which each token was sampled."""

    def until(self, ask: Ask) -> Answer:
        """Tokens up to the end of the request."""
        count = min(ask.max_tokens, len(self.tokens))
        stops = (i + 1 for i, token in enumerate(self.tokens) if token in ask.sampling.stop_token_ids)
        count = min(count, next(stops, count))
        return Answer(self.tokens[:count], self.logits[:count])

    @property
    def decided(self) -> int:
        """Leading tokens that logits within the tolerance cannot change: the best is far enough from the second."""
        best = self.logits.topk(2).values
        close = (best[:, 0] - best[:, 1] <= 2 * TOLERANCE).nonzero()
        return int(close[0]) if len(close) else len(self.tokens)


class Reference:
    """A checkpoint in transformers: eager attention, float32, greedy, with its KV cache. It has no pages, no chunks
    and no other requests. Each prompt is computed once, with prompts of its length at a time."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
        self._model: Any = model.eval()
        self._answers: dict[tuple[int, ...], Answer] = {}

    def answers(self, asks: Iterable[Ask]) -> list[Answer]:
        """The greedy answers, or their first `ANSWER` tokens."""
        asks = list(asks)
        missing = defaultdict(list)
        for prompt in {ask.prompt: None for ask in asks if ask.prompt not in self._answers}:
            missing[len(prompt)].append(prompt)
        for prompts in missing.values():
            self._answers |= zip(prompts, self._generate(prompts), strict=True)
        return [self._answers[ask.prompt].until(ask) for ask in asks]

    @torch.inference_mode()
    def _generate(self, prompts: list[tuple[int, ...]]) -> list[Answer]:
        inputs = torch.tensor(prompts)
        cache = None
        logits, tokens = [], []
        for _ in range(ANSWER):
            out = self._model(inputs, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits[:, -1])
            inputs = logits[-1].argmax(-1, keepdim=True)
            tokens.append(inputs[:, 0])
        columns = zip(torch.stack(tokens, 1).tolist(), torch.stack(logits, 1), strict=True)
        return [Answer(row, scores) for row, scores in columns]
