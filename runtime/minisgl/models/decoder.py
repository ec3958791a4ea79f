"""The decoder-only transformer that Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE are cases of."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal

import torch

from minisgl.attention.interface import Attention
from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.kernels.attention.rotation import Rotation
from minisgl.layers.activation import GATED_ACTIVATIONS, silu_and_mul
from minisgl.layers.linear import ColumnParallelLinear, RowParallelLinear
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import Rotary
from minisgl.layers.vocabulary import LMHead, VocabParallelEmbedding, VocabularyShard
from minisgl.layers.weights.allocate import allocate_experts
from minisgl.layers.weights.dense import DenseWeight
from minisgl.layers.weights.inputs import PreNorm
from minisgl.layers.weights.parameters import Parameters
from minisgl.layers.weights.weight import Projection
from minisgl.models.config import ModelConfig, MoeConfig
from minisgl.moe.mixture import mixture_of_experts


class SelfAttention:
    def __init__(self, config: ModelConfig, parallel: TensorParallel, parameters: Parameters, layer: int) -> None:
        name = f"model.layers.{layer}.self_attn"
        self._layer = layer
        self._head_dim = config.head_dim
        self._eps = config.rms_norm_eps
        heads = parallel.shard(config.num_heads)
        kv_heads = local_kv_heads(config, parallel)
        self._heads = [_length(heads), _length(kv_heads), _length(kv_heads)]
        self.norm = _norm(config, parameters, f"model.layers.{layer}.input_layernorm")
        self.qkv = ColumnParallelLinear(
            parameters,
            config.hidden_size,
            [
                Projection(f"{name}.q_proj", config.num_heads * config.head_dim, _scaled(heads, config.head_dim)),
                Projection(f"{name}.k_proj", config.num_kv_heads * config.head_dim, _scaled(kv_heads, config.head_dim)),
                Projection(f"{name}.v_proj", config.num_kv_heads * config.head_dim, _scaled(kv_heads, config.head_dim)),
            ],
            bias=config.qkv_bias,
        )
        self.q_norm = parameters.replicated(f"{name}.q_norm.weight", config.head_dim) if config.qk_norm else None
        self.k_norm = parameters.replicated(f"{name}.k_norm.weight", config.head_dim) if config.qk_norm else None
        self.out = RowParallelLinear(
            parameters,
            f"{name}.o_proj",
            config.num_heads * config.head_dim,
            config.hidden_size,
            parallel,
            bias=config.output_bias,
        )

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        cos_sin: torch.Tensor,
        attention: Attention,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend, then keep only `rows` if given."""
        qkv, residual = self.qkv.weight.normed_product(PreNorm(self.norm, x, residual), self.qkv.bias)
        q, k, v = torch.split(qkv.view(len(qkv), -1, self._head_dim), self._heads, dim=1)
        rotation = Rotation(cos_sin, self.q_norm, self.k_norm, self._eps)
        heads = attention.attend(self._layer, q, k, v, rotation)
        if rows is not None:
            heads, residual = heads[rows], residual[rows]
        return self.out.forward(heads), residual


class FeedForward:
    def __init__(self, config: ModelConfig, parallel: TensorParallel, parameters: Parameters, layer: int) -> None:
        name = f"model.layers.{layer}.mlp"
        size = config.intermediate_size
        self.norm = _norm(config, parameters, f"model.layers.{layer}.post_attention_layernorm")
        self._activation = GATED_ACTIVATIONS[config.activation]
        self.gate_up = ColumnParallelLinear(
            parameters,
            config.hidden_size,
            [Projection(f"{name}.{part}", size, parallel.shard(size)) for part in ("gate_proj", "up_proj")],
            bias=config.mlp_bias,
        )
        self.down = RowParallelLinear(
            parameters, f"{name}.down_proj", size, config.hidden_size, parallel, bias=config.mlp_bias
        )

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        block, both = PreNorm(self.norm, x, residual), self.gate_up
        inner, residual = both.weight.gated_product(block, both.bias, self._activation, self.down.weight)
        return self.down.forward(inner), residual


class SparseFeedForward:
    """Mixture of experts; every rank holds an equal part of every expert's intermediate features."""

    def __init__(
        self, config: ModelConfig, moe: MoeConfig, parallel: TensorParallel, parameters: Parameters, layer: int
    ) -> None:
        name = f"model.layers.{layer}.mlp"
        self.norm = _norm(config, parameters, f"model.layers.{layer}.post_attention_layernorm")
        self._parallel = parallel
        self._moe = moe
        self._activation = GATED_ACTIVATIONS[config.activation]
        hidden, size, part = config.hidden_size, moe.intermediate_size, parallel.shard(moe.intermediate_size)
        self.router = DenseWeight(parameters.replicated(f"{name}.gate.weight", moe.num_experts, hidden))
        self.experts = allocate_experts(
            parameters,
            f"{name}.experts",
            moe.num_experts,
            hidden,
            size,
            part,
            keep=self._activation is silu_and_mul,
        )

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, logits, residual = self.router.norm_and_product(PreNorm(self.norm, x, residual))
        out = mixture_of_experts(
            x,
            logits,
            *self.experts,
            self._activation,
            self._moe.experts_per_token,
            renormalize=self._moe.renormalize,
        )
        return self._parallel.all_reduce_sum(out), residual


class DecoderLayer:
    """Attention and feed-forward. Each takes the output of the previous block and the residual stream, adds them, and
    normalizes the sum."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, parameters: Parameters, layer: int) -> None:
        self.attention = SelfAttention(config, parallel, parameters, layer)
        self.feed_forward: FeedForward | SparseFeedForward
        if config.moe is not None and config.moe.layers[layer]:
            self.feed_forward = SparseFeedForward(config, config.moe, parallel, parameters, layer)
        else:
            self.feed_forward = FeedForward(config, parallel, parameters, layer)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        cos_sin: torch.Tensor,
        attention: Attention,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`rows`: compute only these behind the attention; nothing reads the others."""
        x, residual = self.attention.forward(x, residual, cos_sin, attention, rows)
        # A chunk in the middle of a prompt leaves no rows.
        return self.feed_forward.forward(x, residual) if len(residual) else (x, residual)


class Decoder:
    """One rank's part of a model. `load_weights` or `fill_random` fill its parameters.

    Neither `forward` nor `local_logits` waits for the device, and shapes follow from T and S alone: both can be
    captured in a CUDA graph.
    """

    def __init__(
        self,
        config: ModelConfig,
        parallel: TensorParallel,
        dtype: torch.dtype,
        device: torch.device | str,
        max_position: int | None = None,
        *,
        keep_quantized: bool | None = None,
    ) -> None:
        """`max_position`: upper bound of positions; None: that of the model. `keep_quantized`: see `Parameters`. Raises
        ModelError if the model cannot be split over the ranks.
        """
        config.check_tensor_parallel(parallel.size)
        device = torch.device(device)
        self.config = config
        self.parameters = Parameters(dtype, device, config.quantization, keep_quantized=keep_quantized)
        shard = VocabularyShard(config.vocab_size, parallel)
        self.vocab_start = shard.start
        """First token of this rank's shard of the vocabulary."""
        self.vocab_local = shard.size
        """Tokens in the shard, the same on every rank; padding behind the vocabulary has the lowest logit."""
        self.num_kv_heads_local = _length(local_kv_heads(config, parallel))
        """KV heads on this rank, which its KV pool stores per layer and token."""

        self.embedding = VocabParallelEmbedding(
            self.parameters, "model.embed_tokens", config.hidden_size, shard, parallel
        )
        self.rotary = Rotary(config.rope, config.head_dim, max_position or config.max_model_len, device)
        self.layers = [DecoderLayer(config, parallel, self.parameters, i) for i in range(config.num_layers)]
        self.norm = _norm(config, self.parameters, "model.norm")
        if config.tied_embeddings:
            self.head = LMHead(self.embedding.weight, shard)
        else:
            self.head = LMHead(shard.new_weight(self.parameters, "lm_head", config.hidden_size), shard)

    def with_layers(self, layers: Sequence[int]) -> Decoder:
        """A model with only these layers. It shares their parameters."""
        model = copy.copy(self)
        model.layers = [self.layers[layer] for layer in layers]
        return model

    @property
    def parameter_bytes(self) -> int:
        """Bytes of this rank's parameters."""
        return self.parameters.num_bytes

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """tokens and positions [T] int32 or int64 to final hidden states in the model's dtype: [T, hidden], or only
        `rows` [S], [S, hidden]. For other rows the last layer only writes keys and values."""
        x = self.embedding.forward(tokens)
        cos_sin = self.rotary.at(positions)
        residual = None
        for layer in self.layers[:-1]:
            x, residual = layer.forward(x, residual, cos_sin, attention)
        x, residual = self.layers[-1].forward(x, residual, cos_sin, attention, rows)
        x, _ = self.norm.forward(x, residual)
        return x

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s result [S, hidden] to [S, vocab_local]: the logits of this rank's shard, in the model's
        dtype. Concatenated over the ranks and cut to `config.vocab_size`, they are the logits of the model."""
        return self.head.forward(hidden)


def _norm(config: ModelConfig, parameters: Parameters, name: str) -> RMSNorm:
    return RMSNorm(parameters.replicated(f"{name}.weight", config.hidden_size), config.rms_norm_eps)


def local_kv_heads(config: ModelConfig, parallel: TensorParallel) -> slice:
    """KV heads that this rank's query heads read. With fewer KV heads than ranks, neighbours hold the same head."""
    if parallel.size <= config.num_kv_heads:
        return parallel.shard(config.num_kv_heads)
    head = parallel.rank * config.num_kv_heads // parallel.size
    return slice(head, head + 1)


def _scaled(part: slice, size: int) -> slice:
    return slice(part.start * size, part.stop * size)


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def checkpoint_parameters(
    config: ModelConfig,
    *,
    keep_quantized: bool = False,
    ranks: int = 1,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
) -> Parameters:
    """Parameters of a whole model, or of the first of several `ranks`, on the meta device: names and shapes of a
    checkpoint's tensors, without memory. `keep_quantized`: as on a Hopper GPU; else as on others."""
    parallel = TensorParallel()
    # A group without other members, as nothing is computed.
    parallel.size = ranks
    decoder = Decoder(config, parallel, getattr(torch, dtype), "meta", max_position=1, keep_quantized=keep_quantized)
    return decoder.parameters
