"""Inputs of each layer that depend on the token itself."""

from __future__ import annotations

import torch

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.kernels.pointwise.norm import rms_norm
from minisgl.layers.activation import ACTIVATIONS
from minisgl.layers.vocabulary import VocabParallelEmbedding, VocabularyShard
from minisgl.layers.weights.allocate import allocate
from minisgl.layers.weights.parameters import Parameters
from minisgl.layers.weights.weight import Projection, Weight
from minisgl.models.blocks.norms import norm_of
from minisgl.models.config import ModelConfig
from minisgl.models.decoder_config import TokenInputs


class TokenInputTable:
    """Inputs of all layers from the ids and the embeddings of tokens."""

    def __init__(
        self, config: ModelConfig, of: TokenInputs, parameters: Parameters, parallel: TensorParallel, dtype: torch.dtype
    ) -> None:
        self._shape = config.num_layers, of.size
        width, hidden = config.num_layers * of.size, config.hidden_size
        shard = VocabularyShard(of.vocab_size, parallel)
        self.table = VocabParallelEmbedding(parameters, "model.embed_tokens_per_layer", width, shard, parallel)
        self.projection = _whole_linear(parameters, "model.per_layer_model_projection", hidden, width)
        self.gain = parameters.replicated("model.per_layer_projection_norm.weight", of.size)
        self._kind = config.decoder.norm
        self._scale = torch.tensor(of.size**0.5, dtype=dtype).item()
        self._projection_scale = hidden**-0.5

    def forward(self, tokens: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """tokens [T] and embeddings [T, hidden] to [T, layers, size]."""
        kind = self._kind
        own = (self.table.forward(tokens) * self._scale).view(-1, *self._shape)
        context = (self.projection.product(embeddings) * self._projection_scale).view(-1, *self._shape)
        normed = rms_norm(context, self.gain, kind.eps, unit_offset=kind.unit_offset, round_last=kind.round_last)
        return (normed + own) * 2**-0.5


class TokenInput:
    """End of a layer that depends on the token itself."""

    def __init__(self, config: ModelConfig, of: TokenInputs, parameters: Parameters, layer: int) -> None:
        name, hidden = f"model.layers.{layer}", config.hidden_size
        self._layer = layer
        self._activation = ACTIVATIONS[of.activation]
        self.gate = _whole_linear(parameters, f"{name}.per_layer_input_gate", hidden, of.size)
        self.out = _whole_linear(parameters, f"{name}.per_layer_projection", of.size, hidden)
        self.norm = norm_of(config, parameters, f"{name}.post_per_layer_input_norm")

    def forward(self, x: torch.Tensor, token_inputs: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], the residual stream, and inputs of all layers [T, layers, size] to the new stream."""
        both = torch.cat((self.gate.product(x), token_inputs[:, self._layer]), dim=-1)
        added, _ = self.norm.forward(self.out.product(self._activation(both)), None)
        return x + added


def _whole_linear(parameters: Parameters, name: str, in_features: int, out_features: int) -> Weight:
    """Weight of a linear layer that every rank holds whole."""
    return allocate(parameters, [Projection(name, out_features, slice(0, out_features))], in_features)
