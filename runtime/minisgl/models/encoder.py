"""The encoder that all supported ones are cases of: BERT (arXiv:1810.04805) and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
import torch.nn.functional as F

from minisgl.attention.packed import PackedAttention
from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.kernels.attention.rotation import Rotation
from minisgl.kernels.pointwise.norm import add_layer_norm
from minisgl.layers.activation import ACTIVATIONS
from minisgl.layers.linear import ColumnParallelLinear, RowParallelLinear, stacked
from minisgl.layers.rope_config import RopeConfig
from minisgl.layers.rotary import Rotary
from minisgl.layers.vocabulary import VocabParallelEmbedding, VocabularyShard
from minisgl.layers.weights.parameters import Parameters
from minisgl.layers.weights.weight import Projection
from minisgl.models.config import ModelConfig
from minisgl.models.encoder_config import EncoderConfig

_ACTIVATIONS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


class LayerNorm:
    """Layer normalization of the residual stream."""

    def __init__(self, config: ModelConfig, of: EncoderConfig, parameters: Parameters, name: str) -> None:
        self._eps = of.norm_eps
        self.gain = parameters.replicated(f"model.{name}.weight", config.hidden_size)
        self.bias = parameters.replicated(f"model.{name}.bias", config.hidden_size) if of.norm_bias else None

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `x`, which the sum may overwrite, to the stream, and normalize it. Without a stream `x` begins it."""
        return add_layer_norm(x, residual, self.gain, self.bias, self._eps)


class Embeddings:
    """Sum of the embeddings of a token, of its position and of its type, normalized."""

    def __init__(
        self, config: ModelConfig, of: EncoderConfig, parallel: TensorParallel, parameters: Parameters
    ) -> None:
        names, hidden = of.names, config.hidden_size
        shard = VocabularyShard(config.vocab_size, parallel)
        self.tokens = VocabParallelEmbedding(parameters, f"model.{names.tokens}", hidden, shard, parallel)
        self.positions = self.token_types = None
        if of.positions:
            self.positions = parameters.replicated(f"model.{names.positions}.weight", of.positions, hidden)
        if of.token_types:
            self.token_types = parameters.replicated(f"model.{names.token_types}.weight", of.token_types, hidden)
        self._first_position = of.first_position
        self.norm = LayerNorm(config, of, parameters, names.embedding_norm)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, token_types: torch.Tensor | None) -> torch.Tensor:
        x = self.tokens.forward(tokens)
        if self.token_types is not None:
            # Some models have a table with one row, for pairs as well.
            if token_types is None or len(self.token_types) == 1:
                x = x + self.token_types[0]
            else:
                x = x + F.embedding(token_types, self.token_types)
        if self.positions is not None:
            x = x + F.embedding(positions + self._first_position, self.positions)
        x, _ = self.norm.forward(x)
        return x


class SelfAttention:
    def __init__(
        self, config: ModelConfig, of: EncoderConfig, parallel: TensorParallel, parameters: Parameters, layer: int
    ) -> None:
        block, names, hidden = of.layers[layer].attention, of.names, config.hidden_size
        name = f"model.{names.layers}.{layer}"
        assert block.num_kv_heads == block.num_heads
        self._layer = layer
        self._config = block
        size, part = block.num_heads * block.head_dim, parallel.shard(block.num_heads)
        rows = slice(part.start * block.head_dim, part.stop * block.head_dim)
        fused = f"{name}.{names.qkv[0]}" if len(names.qkv) == 1 else None
        parts = names.qkv * 3 if fused else names.qkv
        self.qkv = ColumnParallelLinear(
            parameters,
            hidden,
            stacked(fused, [Projection(f"{name}.{each}", size, rows) for each in parts]),
            bias=block.qkv_bias,
        )
        output = f"{name}.{names.attention_output}"
        self.out = RowParallelLinear(parameters, output, size, hidden, parallel, bias=block.output_bias, in_parts=False)

    def forward(
        self, x: torch.Tensor, angles: Mapping[RopeConfig, torch.Tensor], attention: PackedAttention
    ) -> torch.Tensor:
        qkv = self.qkv.weight.product(x, self.qkv.bias)
        q, k, v = qkv.view(len(qkv), -1, self._config.head_dim).chunk(3, dim=1)
        rope = self._config.rope
        rotation = None if rope is None else Rotation(angles[rope])
        return self.out.forward(attention.attend(self._layer, q, k, v, rotation))


class FeedForward:
    def __init__(
        self, config: ModelConfig, of: EncoderConfig, parallel: TensorParallel, parameters: Parameters, layer: int
    ) -> None:
        block, names, hidden = of.layers[layer].feed_forward, of.names, config.hidden_size
        name, size = f"model.{names.layers}.{layer}", block.intermediate_size
        self._activation = (ACTIVATIONS if block.is_gated else _ACTIVATIONS)[block.activation]
        fused = f"{name}.{names.fused_gate}" if names.fused_gate else None
        parts = ("", "") if fused else names.feed_forward_input
        assert len(parts) == 1 + block.is_gated
        inner = stacked(fused, [Projection(f"{name}.{each}", size, parallel.shard(size)) for each in parts])
        if names.gate_is_second:
            inner.reverse()
        self.inner = ColumnParallelLinear(parameters, hidden, inner, bias=block.input_bias)
        output = f"{name}.{names.feed_forward_output}"
        self.out = RowParallelLinear(parameters, output, size, hidden, parallel, bias=block.output_bias, in_parts=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out.forward(self._activation(self.inner.weight.product(x, self.inner.bias)))


class EncoderLayer:
    def __init__(
        self, config: ModelConfig, of: EncoderConfig, parallel: TensorParallel, parameters: Parameters, layer: int
    ) -> None:
        name = f"{of.names.layers}.{layer}"
        self._norms_before = of.norms == "pre"
        self.attention = SelfAttention(config, of, parallel, parameters, layer)
        self.attention_norm = None
        if of.layers[layer].norms_attention:
            self.attention_norm = LayerNorm(config, of, parameters, f"{name}.{of.names.attention_norm}")
        self.feed_forward = FeedForward(config, of, parallel, parameters, layer)
        self.feed_forward_norm = LayerNorm(config, of, parameters, f"{name}.{of.names.feed_forward_norm}")

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        angles: Mapping[RopeConfig, torch.Tensor],
        attention: PackedAttention,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """With norms before blocks: the output of the block before it and the residual stream, to which it is added
        first, to those of the next layer. Else there is only the stream, `x`."""
        if self._norms_before:
            normed, stream = x, x
            if self.attention_norm is not None:
                normed, stream = self.attention_norm.forward(x, residual)
            normed, stream = self.feed_forward_norm.forward(self.attention.forward(normed, angles, attention), stream)
            return self.feed_forward.forward(normed), stream
        assert self.attention_norm is not None
        x, _ = self.attention_norm.forward(self.attention.forward(x, angles, attention), x)
        x, _ = self.feed_forward_norm.forward(self.feed_forward.forward(x), x)
        return x, None


class Encoder:
    """One rank's part of a model. `load_weights` or `fill_random` fill its parameters. `forward` does not wait for the
    device."""

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
        """As `Decoder`."""
        of = config.encoder
        assert of is not None
        config.check_tensor_parallel(parallel.size)
        device = torch.device(device)
        self.config = config
        self.parameters = Parameters(
            dtype, device, config.quantization, keep_quantized=keep_quantized, left_out=of.names.left_out
        )
        length = max_position or config.max_model_len
        self.rotary = {
            block.rope: Rotary(block.rope, block.head_dim, length, device)
            for block in config.attentions
            if block.rope is not None
        }
        self.embeddings = Embeddings(config, of, parallel, self.parameters)
        self.layers = [EncoderLayer(config, of, parallel, self.parameters, i) for i in range(config.num_layers)]
        self.norm = LayerNorm(config, of, self.parameters, of.names.final_norm) if of.norms == "pre" else None

    @property
    def parameter_bytes(self) -> int:
        """Bytes of this rank's parameters."""
        return self.parameters.num_bytes

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: PackedAttention,
        token_types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """tokens, positions and token types [T] int32 or int64 to final hidden states [T, hidden] in the model's dtype.
        Positions begin at 0 in each text. Without token types all are 0."""
        angles = {rope: table.at(positions) for rope, table in self.rotary.items()}
        x = self.embeddings.forward(tokens, positions, token_types)
        residual = None
        for layer in self.layers:
            x, residual = layer.forward(x, residual, angles, attention)
        if self.norm is not None:
            x, _ = self.norm.forward(x, residual)
        return x
