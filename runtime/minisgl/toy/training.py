"""Training of very small models on a CPU, with the same `Decoder` that serves them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.kernels.attention.rotation import Rotation
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder
from minisgl.models.random_weights import fill_random
from minisgl.toy.muon import Muon
from minisgl.toy.tiny_tokenizer import Family

_ADAM_RATE: Final = 4e-3
_MUON_RATE: Final = 2e-2
_LAYER_SCALE: Final = 0.05
_CONSTANT_FEATURE: Final = 0.1
_AVERAGED_STEPS: Final = 50
_FAST_PAIRS: Final = 4
"""Pairs of a head that rotation turns fastest: they tell a token from its neighbors."""

IGNORED: Final = -100
"""Label of tokens without a loss."""

MARGIN: Final = 0.5
"""Least distance of a right token's logit to the others when a model is judged: rounding changes logits by less."""


def qwen3_config(
    tokenizer: Tokenizer, family: Family, *, intermediate: int, layers: int, kv_heads: int, head_dim: int
) -> dict[str, Any]:
    """Return the config.json of a very small Qwen3 with this tokenizer."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 128,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_window": None,
        "use_sliding_window": False,
        "bos_token_id": None,
        "torch_dtype": "bfloat16",
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": tokenizer.token_to_id(family.eos),
        "pad_token_id": tokenizer.token_to_id(family.pad),
    }


def labels_of(tokens: Sequence[int], learned: Sequence[bool]) -> list[int]:
    """Return the token that follows each but the last one, where it is learned, else IGNORED."""
    return [token if learn else IGNORED for token, learn in zip(tokens[1:], learned[1:], strict=True)]


class Training:
    """A model and its optimizers, for rows of at most `max_tokens` tokens."""

    def __init__(self, config: ModelConfig, seed: int, max_tokens: int, *, is_copying: bool = False) -> None:
        """With `is_copying`, the model learns in a few hundred steps to repeat what the prompt says: it begins with
        heads that copy, and Muon trains the matrices of the layers."""
        self._model = Decoder(config, TensorParallel(), torch.float32, "cpu", max_position=max_tokens)
        fill_random(self._model.parameters, seed)
        self._sources = self._model.parameters.sources
        with torch.no_grad():
            self._model.embedding.weight.mul_(0.25)
            if is_copying:
                self._begin_with_copies(config, seed)
        # A source is a view when a parameter has several of them; the whole parameter is trained.
        bases = (source.into if source.into._base is None else source.into._base for source in self._sources)
        self._parameters = list({id(base): base.requires_grad_() for base in bases}.values())
        matrices = [
            one for one in self._parameters if is_copying and one.ndim == 2 and one is not self._model.embedding.weight
        ]
        taken = {id(matrix) for matrix in matrices}
        others = [one for one in self._parameters if id(one) not in taken]
        self._optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0), _ADAM_RATE)
        ]
        if matrices:
            self._optimizers.append((Muon(matrices), _MUON_RATE))

        self._averages = [one.detach().clone() for one in self._parameters]
        self._steps = 0

    def step(self, tokens: torch.Tensor, labels: torch.Tensor, rate: float) -> float:
        """Train on tokens and labels, both int64 [rows, row tokens]; returns the loss. A label is the token that
        follows, or IGNORED. `rate` is a factor of the learning rates."""
        loss = F.cross_entropy(*self._logits_and_targets(tokens, labels))
        for optimizer, full_rate in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = full_rate * rate
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer, _ in self._optimizers:
            optimizer.step()
        self._steps += 1
        with torch.no_grad():
            for average, parameter in zip(self._averages, self._parameters, strict=True):
                average.lerp_(parameter, 1 / min(self._steps, _AVERAGED_STEPS))
        return loss.item()

    def margins(self, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        """Return float32 [rows, row tokens] for each batch of tokens and labels: by how much the logit of each label
        exceeds those of all other tokens, with the weights that `weights` returns; infinite for IGNORED."""
        with torch.no_grad(), self._as_written():
            return [self._margins(tokens, labels) for tokens, labels in batches]

    def _margins(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits, targets = self._logits_and_targets(tokens, labels)
        right = targets.unsqueeze(1)
        margins = logits.gather(1, right).squeeze(1) - logits.scatter(1, right, -math.inf).amax(1)
        return torch.full(labels.shape, math.inf).masked_scatter(labels != IGNORED, margins)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return bfloat16 weights by their names in a checkpoint: averages of those of the last steps, which are better
        than any of them."""
        with torch.no_grad(), self._as_written():
            return {source.name: source.into.to(torch.bfloat16) for source in self._sources}

    @contextmanager
    def _as_written(self) -> Iterator[None]:
        """Let the model have the weights of a checkpoint in the block: averages, rounded to bfloat16."""
        trained = [parameter.clone() for parameter in self._parameters]
        try:
            for parameter, average in zip(self._parameters, self._averages, strict=True):
                parameter.copy_(average.to(torch.bfloat16))
            yield
        finally:
            for parameter, value in zip(self._parameters, trained, strict=True):
                parameter.copy_(value)

    def _begin_with_copies(self, config: ModelConfig, seed: int) -> None:
        """Let heads pass on what they attend to, and make layers small beside what they add to: the residual stream
        begins as the tokens themselves."""
        into = {source.name: source.into for source in self._sources}
        generator = torch.Generator().manual_seed(seed)
        size, heads = config.hidden_size, config.attention.num_heads
        assert config.attention.num_kv_heads == heads and heads * config.attention.head_dim % size == 0
        for layer in range(config.num_layers):
            bases = [
                torch.linalg.qr(torch.randn(size, size, generator=generator)).Q
                for _ in range(heads * config.attention.head_dim // size)
            ]
            values = torch.cat(bases)
            into[f"model.layers.{layer}.self_attn.v_proj.weight"].copy_(values)
            into[f"model.layers.{layer}.self_attn.o_proj.weight"].copy_(_LAYER_SCALE * values.T)
            into[f"model.layers.{layer}.mlp.down_proj.weight"].mul_(_LAYER_SCALE)
        self._begin_with_neighbors(config, into, generator)

    def _begin_with_neighbors(
        self, config: ModelConfig, into: Mapping[str, torch.Tensor], generator: torch.Generator
    ) -> None:
        """Let the first head of the first layer attend to the previous token, through a feature that is the same for
        all tokens: it changes all logits alike."""
        self._model.embedding.weight[:, 0] = _CONSTANT_FEATURE
        half, rope = config.attention.head_dim // 2, config.attention.rope
        assert rope is not None
        pairs = torch.arange(_FAST_PAIRS)
        # Keys are turned by their position. These queries look for the one that is turned by one position less.
        angle = rope.theta ** (-pairs / half)
        first = slice(0, config.attention.head_dim)
        query, key, output = (into[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qko")
        for weight in (query, key):
            weight[first].mul_(_LAYER_SCALE)
        query[pairs, 0], query[pairs + half, 0] = angle.cos(), -angle.sin()
        key[pairs, 0] = 1.0
        # In another direction than that of the token itself.
        width, size = config.hidden_size, config.attention.head_dim
        mixed = torch.randn(width, size, generator=generator) * width**-0.5
        output[:, first].copy_(_LAYER_SCALE * mixed)

    def _logits_and_targets(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both for the positions that have a label."""
        rows, row_tokens = tokens.shape
        positions = torch.arange(row_tokens).repeat(rows)
        [learned] = (labels.flatten() != IGNORED).nonzero(as_tuple=True)
        hidden = self._model.forward(tokens.flatten(), positions, _CausalRows(rows), learned)
        return self._model.local_logits(hidden), labels.flatten()[learned]


class _CausalRows:
    """Causal attention within each of `rows` sequences of equal length, without a KV pool."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        rotation: Rotation,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert k is not None and v is not None and sinks is None
        q, k = rotation.apply(q, k)
        q, k, v = (part.view(self._rows, -1, *part.shape[1:]).transpose(1, 2) for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(out.shape[0] * out.shape[2], -1)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread in the block: the number of threads determines the order of sums, and so the weights. Two
    threads are hardly faster, and much slower on a busy machine: each waits for the other at every small operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
