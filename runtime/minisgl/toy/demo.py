"""A checkpoint with readable answers: a very small model, trained on this machine to answer questions about minisgl.

A correct answer shows that tokenizer, chat template, cache, attention and sampling work. The model is trained on
conversations of several questions, so that it also answers in the middle of a chat; typing errors in the questions make
it independent of their exact spelling. Training goes on until the weights, as they are written, give each answer with a
margin that rounding does not bridge.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer

from minisgl.errors import ModelError
from minisgl.models.config import ModelConfig
from minisgl.toy.demo_answers import DEMO_ANSWERS
from minisgl.toy.demo_rows import ROW_TOKENS, DemoRows, judged_rows
from minisgl.toy.tiny import write_checkpoint
from minisgl.toy.tiny_tokenizer import FAMILIES, train_tokenizer
from minisgl.toy.training import MARGIN, Training, one_thread, qwen3_config

_FAMILY: Final = FAMILIES["qwen3"]
_MERGES: Final = 512
_VOCAB: Final = 256 + _MERGES + len(_FAMILY.control_tokens)
_STEPS: Final = 400
_WARM_UP: Final = 40
_LEAST_RATE: Final = 0.02
_FURTHER_STEPS: Final = 40
"""Steps of each round that follows while answers are wrong."""
_FURTHER_RATE: Final = 0.2
_ROUNDS: Final = 5
_ATTEMPTS: Final = 3


def write_demo_checkpoint(
    out: str | Path, *, seed: int = 0, progress: Callable[[int, float], None] | None = None
) -> Path:
    """Train the model, which takes about a minute on one core, and write a checkpoint directory; returns `out`.

    It gives the answers to all questions, in the middle of a chat too, which may take the next seed: at most three, of
    600 steps each, in up to five minutes. The same seed gives the same weights on the same machine. `progress` is
    called with each step and its loss. Raises ModelError: `not_trained`, which another seed may help, and
    `cannot_write`.
    """
    tokenizer = demo_tokenizer()
    config = demo_config(tokenizer)
    with one_thread():
        weights = _train(ModelConfig.parse(config), tokenizer, seed, progress or (lambda step, loss: None))
    # Greedy by default, so that everybody gets the answers that it has learned, word for word.
    return write_checkpoint(Path(out), config, tokenizer, _FAMILY, weights, sampling={"temperature": 0.0})


def demo_tokenizer() -> Tokenizer:
    text = "".join(f"{question}\n{taught.answer}\n" for taught in DEMO_ANSWERS for question in taught.questions)
    return train_tokenizer(_FAMILY, _VOCAB, text, _MERGES)


def demo_config(tokenizer: Tokenizer) -> dict[str, Any]:
    return qwen3_config(tokenizer, _FAMILY, intermediate=384, layers=2, kv_heads=2, head_dim=64)


def _train(
    config: ModelConfig, tokenizer: Tokenizer, seed: int, progress: Callable[[int, float], None]
) -> dict[str, torch.Tensor]:
    """Return weights, by their names in a checkpoint, that give all answers. Raises ModelError `not_trained`."""
    judged = judged_rows(tokenizer)
    for attempt in range(_ATTEMPTS):
        training = Training(config, seed + (attempt << 16), ROW_TOKENS)
        rows = DemoRows(tokenizer, seed + (attempt << 16))
        for step in range(_STEPS + _ROUNDS * _FURTHER_STEPS):
            loss = training.step(*rows.batch(), _rate(step))
            progress(step + 1, loss)
            further = step + 1 - _STEPS
            if further >= 0 and further % _FURTHER_STEPS == 0:
                [margins] = training.margins([judged])
                if margins.min().item() >= MARGIN:
                    return training.weights()
    tried = f"{_ATTEMPTS} seeds of {_STEPS + _ROUNDS * _FURTHER_STEPS} steps"
    raise ModelError("not_trained", f"some answers are still wrong with {tried}; try another --seed")


def _rate(step: int) -> float:
    """Factor of the learning rate at a step: linear warm-up, then cosine decay; in further rounds from a lower rate."""
    if step >= _STEPS:
        return _FURTHER_RATE * _decay((step - _STEPS) % _FURTHER_STEPS / _FURTHER_STEPS)
    return min(1.0, (step + 1) / _WARM_UP) * _decay(step / _STEPS)


def _decay(part: float) -> float:
    return _LEAST_RATE + (1 - _LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * part))
