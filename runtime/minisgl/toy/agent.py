"""Checkpoints that think and call tools, in each format of tool calls: a very small model, trained on this machine.

The same weights write all formats; each checkpoint has another chat template. Another processor rounds differently, and
so trains other weights. Training therefore goes on until its weights, as they are written, give the right answers to
five thousand held-out questions, with a margin that rounding does not bridge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer

from minisgl.errors import ModelError
from minisgl.models.config import ModelConfig
from minisgl.toy.agent_cases import all_forms, examples, held_out_conversations
from minisgl.toy.agent_formats import TEMPLATES
from minisgl.toy.agent_rows import AgentRows, Batch
from minisgl.toy.agent_tokenizer import agent_tokenizer, family
from minisgl.toy.tiny import write_checkpoint
from minisgl.toy.training import MARGIN, Training, one_thread, qwen3_config

_BATCH_TOKENS: Final = 2048
_SHORT_ROW: Final = 72
_LONG_ROW: Final = 256
_SHORT_STEPS: Final = 340
"""Steps with rows of about one exchange: each row has other tools."""
_WARM_UP: Final = 20
_DECAY_STEPS: Final = 500
_LEAST_RATE: Final = 0.1
"""Factor of learning rates behind the decay: what is judged and written are averages, which bear it."""
_STEPS: Final = 900
_REPORTED_EVERY: Final = 100
_JUDGED_EVERY: Final = 50
_JUDGED_FROM: Final = 300
_LEAST_RIGHT: Final = {300: 0.6, 500: 0.985}
"""Share of right answers at a step; with less, another seed is tried instead."""
_ATTEMPTS: Final = 6
_VALUES: Final = 6
"""Values with which each question is judged at the end."""


def write_agent_checkpoints(
    out: str | Path, *, seed: int = 3, progress: Callable[[int, int, int], None] | None = None
) -> dict[str, Path]:
    """Train the model, which takes one to two minutes on one core, and write one checkpoint directory for each format
    into `out`; returns them by format. All answers that judge the weights are right, which may take the next seed: at
    most six, of 900 steps each, in up to twenty minutes. With seed 3, processors without AVX-512 need 500 steps; with
    seed 0 they need three attempts. The same seed gives the same weights on the same machine. `progress` is called
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
    tried = f"with {_ATTEMPTS} seeds of at most {_STEPS} steps"
    raise ModelError("not_trained", f"some answers are still wrong {tried} ({kinds}); try another --seed")


def _learns(training: Training, tokenizer: Tokenizer, seed: int, judge: _Judge) -> bool:
    """Train until all held-out answers are right; returns False if that does not happen."""
    short, long = (AgentRows(tokenizer, seed, length) for length in (_SHORT_ROW, _LONG_ROW))
    for step in range(_STEPS):
        rows, length = (short, _SHORT_ROW) if step < _SHORT_STEPS else (long, _LONG_ROW)
        batch = rows.batch(_BATCH_TOKENS // length)
        training.step(batch.tokens, batch.labels, _rate(step))
        done = step + 1
        if done % (_JUDGED_EVERY if done >= _JUDGED_FROM else _REPORTED_EVERY) == 0:
            share = judge.right_share(training, done)
            if share == 1.0 and judge.approves(training, done):
                return True
            if share < _LEAST_RIGHT.get(done, 0.0):
                return False
    return False


class _Judge:
    """Held-out answers."""

    def __init__(self, tokenizer: Tokenizer, progress: Callable[[int, int, int], None]) -> None:
        always = [*examples(tokenizer), held_out_conversations(tokenizer)]
        self._few = [*all_forms(tokenizer, 1), *always]
        self._all = [*all_forms(tokenizer, _VALUES), *always]
        self._progress = progress
        self.wrong: Counter[str] = Counter()
        """Kinds of the answers that were wrong at last."""

    def right_share(self, training: Training, step: int) -> float:
        """Return the share of right answers to a part of the questions."""
        return self._judge(training, step, self._few)

    def approves(self, training: Training, step: int) -> bool:
        """Judge all questions, which takes some seconds."""
        return self._judge(training, step, self._all) == 1.0

    def _judge(self, training: Training, step: int, batches: Sequence[Batch]) -> float:
        self.wrong = _wrong(training, batches)
        answers = sum(len(batch.turns) for batch in batches)
        right = answers - self.wrong.total()
        self._progress(step, right, answers)
        return right / answers


def _wrong(training: Training, batches: Sequence[Batch]) -> Counter[str]:
    """Return the kinds of wrong answers: those that greedy sampling would get wrong, or only just right."""
    margins = training.margins((batch.tokens, batch.labels) for batch in batches)
    return Counter(
        turn.kind
        for batch, of_batch in zip(batches, margins, strict=True)
        for turn in batch.turns
        if of_batch[turn.row, turn.begin : turn.end].min().item() < MARGIN
    )


def _rate(step: int) -> float:
    """Factor of learning rates at a step: linear warm-up and decay."""
    return min(1.0, (step + 1) / _WARM_UP) * max(_LEAST_RATE, 1 - step / _DECAY_STEPS)
