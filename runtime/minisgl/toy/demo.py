"""A checkpoint whose answers a person can judge: a very small model, trained here to answer questions about minisgl.

A right answer on the screen shows that tokenizer, chat template, cache, attention and sampling are right. It is trained
with the same `Decoder` that serves it, on conversations of several questions, so that it answers in the middle of a
chat as well; small mistakes in the questions teach it not to depend on their exact spelling.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.kernels.rotary import Rotation
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder
from minisgl.models.random_weights import fill_random
from minisgl.toy.demo_answers import LESSONS
from minisgl.toy.tiny import write_checkpoint
from minisgl.toy.tiny_tokenizer import FAMILIES, train_tokenizer

STEPS: Final = 420

_FAMILY: Final = FAMILIES["qwen3"]
_MERGES: Final = 512
_VOCAB: Final = 256 + _MERGES + len(_FAMILY.control_tokens)
_MAX_POSITION: Final = 2048
_ROWS: Final = 8
_ROW_TOKENS: Final = 192
_LEARNING_RATE: Final = 4e-3
_WARM_UP: Final = 40
_IGNORED: Final = -100
"""Label of tokens that are not learned: questions, and padding."""
_MISSPELT: Final = 0.35
"""Share of the questions that are changed a little."""

_CONFIG: Final[Mapping[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": _MAX_POSITION,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "sliding_window": None,
    "use_sliding_window": False,
    "bos_token_id": None,
    "torch_dtype": "bfloat16",
}


def write_demo_checkpoint(
    out: str | Path, *, seed: int = 0, steps: int = STEPS, progress: Callable[[int, float], None] | None = None
) -> Path:
    """Train the model, which takes about a minute on one core, and write a checkpoint directory; returns it. The
    same weights for the same seed on the same machine. `progress` is told of each step and its loss."""
    text = "".join(f"{question}\n{lesson.answer}\n" for lesson in LESSONS for question in lesson.questions)
    tokenizer = train_tokenizer(_FAMILY, _VOCAB, text, _MERGES)
    config = {
        **_CONFIG,
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": tokenizer.token_to_id(_FAMILY.eos),
        "pad_token_id": tokenizer.token_to_id(_FAMILY.pad),
    }
    with _one_thread():
        weights = _train(ModelConfig.parse(config), _Conversations(tokenizer, seed), seed, steps, progress)
    return write_checkpoint(Path(out), config, tokenizer, _FAMILY, weights)


class _Conversations:
    """Endless rows of tokens, each a conversation from its beginning, with the labels of what is to be learned."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self._asked = [(question, lesson.answer) for lesson in LESSONS for question in lesson.questions]
        self._deck: list[tuple[str, str]] = []

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels, both [_ROWS, _ROW_TOKENS]; a label is the token that follows."""
        rows = [self._row() for _ in range(_ROWS)]
        return torch.tensor([tokens for tokens, _ in rows]), torch.tensor([labels for _, labels in rows])

    def _row(self) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        learned: list[bool] = []
        while len(tokens) <= _ROW_TOKENS:
            question, answer = self._draw()
            asked = self._encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
            answered = self._encode(f"{answer}<|im_end|>")
            after = self._encode("\n")
            tokens += [*asked, *answered, *after]
            learned += [False] * len(asked) + [True] * len(answered) + [False] * len(after)
        following = [token if learn else _IGNORED for token, learn in zip(tokens[1:], learned[1:], strict=True)]
        return tokens[:_ROW_TOKENS], following[:_ROW_TOKENS]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _draw(self) -> tuple[str, str]:
        """Every question once before any comes again."""
        if not self._deck:
            self._deck = self._random.sample(self._asked, len(self._asked))
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
    conversations: _Conversations,
    seed: int,
    steps: int,
    progress: Callable[[int, float], None] | None,
) -> dict[str, torch.Tensor]:
    """The weights by their names in a checkpoint."""
    model = Decoder(config, TensorParallel(), torch.float32, "cpu", max_position=_ROW_TOKENS)
    fill_random(model.parameters, seed)
    with torch.no_grad():
        model.embedding.weight.mul_(0.25)
    # A source is a view when a parameter has several; what is trained is the whole of it.
    bases = (source.into if source.into._base is None else source.into._base for source in model.parameters.sources)
    parameters = list({id(base): base.requires_grad_() for base in bases}.values())
    optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    positions = torch.arange(_ROW_TOKENS).repeat(_ROWS)
    attention = _WholeRows(_ROWS)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * _share(step, steps)
        tokens, labels = conversations.batch()
        hidden = model.forward(tokens.flatten(), positions, attention)
        wanted = labels.flatten()
        learned = wanted != _IGNORED
        loss = F.cross_entropy(model.local_logits(hidden[learned]), wanted[learned])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if progress is not None:
            progress(step + 1, loss.item())
    with torch.no_grad():
        return {source.name: source.into.detach().to(torch.bfloat16) for source in model.parameters.sources}


def _share(step: int, steps: int) -> float:
    """Of the learning rate: up in a line, down in half a cosine."""
    rise = min(1.0, (step + 1) / _WARM_UP)
    return rise * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))


class _WholeRows:
    """Attention within each of `rows` sequences of equal length, all of which are new: no KV pool is needed."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        q, k = rotation.apply(q, k)
        q, k, v = (part.view(self._rows, -1, *part.shape[1:]).transpose(1, 2) for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(out.shape[0] * out.shape[2], -1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """The number of threads decides the order of sums, and so the weights. Two would hardly be faster, and much slower
    where something else runs: each waits for the other at every small operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
