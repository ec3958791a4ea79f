"""Checkpoints that think and call tools, in each format of tool calls: a very small model, trained on this machine.

The same weights write all formats; each checkpoint has another chat template. Training goes on until five
thousand answers to held-out questions are right, so that its result does not depend on the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer

from minisgl.models.config import ModelConfig
from minisgl.models.errors import ModelError
from minisgl.toy.agent_cases import all_forms, held_out_conversations
from minisgl.toy.agent_formats import TEMPLATES
from minisgl.toy.agent_rows import AgentRows, Batch
from minisgl.toy.agent_tokenizer import agent_tokenizer, family
from minisgl.toy.tiny import write_checkpoint
from minisgl.toy.training import Training, one_thread, qwen3_config

_BATCH_TOKENS: Final = 2048
_SHORT_ROW: Final = 72
_LONG_ROW: Final = 256
_SHORT_STEPS: Final = 340
"""Steps with rows of about one exchange: each row has other tools."""
_STEPS: Final = 500
_WARM_UP: Final = 20
_LEAST_RATE: Final = 0.02
_FURTHER_STEPS: Final = 50
"""Steps of each round that follows while answers are wrong, at a lower rate."""
_NEARLY_RIGHT: Final = 0.995
_FURTHER_RATES: Final = (0.3, 0.1)
"""Rates of such a round; the lower one if the share of right answers is at least _NEARLY_RIGHT."""
_ROUNDS: Final = 8
_REPORTED_EVERY: Final = 100
_LEAST_RIGHT: Final = {300: 0.6, _STEPS: 0.985}
"""Share of right answers at a step; with less, another seed is tried instead."""
_ATTEMPTS: Final = 3
_MARGIN: Final = 0.5
"""Least distance of the right token's logit to the others: rounding changes logits by less."""
_VALUES: Final = 6
"""Values with which each question is judged at the end."""


def write_agent_checkpoints(
    out: str | Path, *, seed: int = 0, progress: Callable[[int, int, int], None] | None = None
) -> dict[str, Path]:
    """Train the model, which takes one to two minutes on one core, and write one checkpoint directory for each format
    into `out`; returns them by format. The same seed gives the same weights on the same machine. `progress` is called
    with the step, the number of right answers and that of all. Raises ModelError: `not_trained`, which another seed may
    help, and `cannot_write`."""
    tokenizer = agent_tokenizer()
    families = {name: family(template) for name, template in TEMPLATES.items()}
    first = next(iter(families.values()))
    config = qwen3_config(tokenizer, first, intermediate=256, layers=2, kv_heads=4, head_dim=32)
    with one_thread():
        weights = _train(ModelConfig.parse(config), tokenizer, seed, progress or (lambda step, right, answers: None))
    return {
        name: write_checkpoint(Path(out) / name, config, tokenizer, family, weights)
        for name, family in families.items()
    }


def _train(
    config: ModelConfig, tokenizer: Tokenizer, seed: int, progress: Callable[[int, int, int], None]
) -> dict[str, torch.Tensor]:
    """Return weights with which all held-out answers are right. Raises ModelError `not_trained`."""
    judge = _Judge(tokenizer, progress)
    for attempt in range(_ATTEMPTS):
        training = Training(config, seed + (attempt << 16), _LONG_ROW, is_copying=True)
        if _learns(training, tokenizer, seed + (attempt << 16), judge):
            return training.weights()
    kinds = ", ".join(f"{count} of {kind}" for kind, count in judge.wrong.most_common(10))
    raise ModelError("not_trained", f"some answers are still wrong ({kinds}); try another --seed")


def _learns(training: Training, tokenizer: Tokenizer, seed: int, judge: _Judge) -> bool:
    """Train until all held-out answers are right; returns False if that does not happen."""
    short, long = (AgentRows(tokenizer, seed, length) for length in (_SHORT_ROW, _LONG_ROW))
    share = 0.0
    for step in range(_STEPS + _ROUNDS * _FURTHER_STEPS):
        rows, length = (short, _SHORT_ROW) if step < _SHORT_STEPS else (long, _LONG_ROW)
        batch = rows.batch(_BATCH_TOKENS // length)
        training.step(batch.tokens, batch.labels, _rate(step, share))
        done = step + 1
        is_end = done >= _STEPS and (done - _STEPS) % _FURTHER_STEPS == 0
        if is_end or done % _REPORTED_EVERY == 0:
            share = judge.right_share(training, done)
            if is_end and share == 1.0 and judge.approves(training, done):
                return True
            if share < _LEAST_RIGHT.get(done, 0.0):
                return False
    return False


class _Judge:
    """Held-out answers."""

    def __init__(self, tokenizer: Tokenizer, progress: Callable[[int, int, int], None]) -> None:
        self._long = held_out_conversations(tokenizer)
        self._few = [*all_forms(tokenizer, 1), self._long]
        self._all = [*all_forms(tokenizer, _VALUES), self._long]
        self._progress = progress
        self.wrong: Counter[str] = Counter()
        """Kinds of the answers that were wrong at last."""

    def right_share(self, training: Training, step: int) -> float:
        """Return the share of right answers to a part of the questions."""
        return self._judge(training, step, self._few)

    def approves(self, training: Training, step: int) -> bool:
        """Judge all questions, which takes some seconds."""
        return self._judge(training, step, self._all) == 1.0

    def _judge(self, training: Training, step: int, batches: list[Batch]) -> float:
        """An answer is wrong if greedy sampling would get it wrong, or only just right."""
        self.wrong = Counter()
        for batch in batches:
            margins = training.margins(batch.tokens, batch.labels)
            for turn in batch.turns:
                self.wrong[turn.kind] += margins[turn.row, turn.begin : turn.end].min().item() < _MARGIN
        answers = sum(len(batch.turns) for batch in batches)
        right = answers - self.wrong.total()
        self._progress(step, right, answers)
        return right / answers


def _rate(step: int, share: float) -> float:
    """Factor of learning rates at a step: linear warm-up and decay; in further rounds from a lower rate. `share` of the
    answers was right at last."""
    if step >= _STEPS:
        return _FURTHER_RATES[share >= _NEARLY_RIGHT] * _decay((step - _STEPS) % _FURTHER_STEPS / _FURTHER_STEPS)
    return min(1.0, (step + 1) / _WARM_UP) * _decay(step / _STEPS)


def _decay(part: float) -> float:
    return max(_LEAST_RATE, 1 - part)
