"""The dense feed-forward of a layer."""

from __future__ import annotations

import torch

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.layers.activation import ACTIVATIONS
from minisgl.layers.linear import ColumnParallelLinear, stacked
from minisgl.layers.weights.inputs import PreNorm
from minisgl.layers.weights.parameters import Parameters
from minisgl.layers.weights.weight import Projection
from minisgl.models.blocks.norms import norm_before_feed_forward
from minisgl.models.blocks.output import new_output
from minisgl.models.config import ModelConfig
from minisgl.models.decoder_config import UNGATED, FeedForwardConfig, FeedForwardNames


class FeedForward:
    def __init__(
        self, config: ModelConfig, of: FeedForwardConfig, parallel: TensorParallel, parameters: Parameters, layer: int
    ) -> None:
        names, size = config.decoder.names.feed_forward, of.intermediate_size
        name = f"model.layers.{layer}.{names.prefix}"
        self.norm = norm_before_feed_forward(config, parameters, layer)
        self._activation = ACTIVATIONS[of.activation]
        self.gate_up = ColumnParallelLinear(
            parameters,
            config.hidden_size,
            gate_and_up(name, names, of, parallel),
            bias=of.bias,
        )
        self.down = new_output(config, parallel, parameters, layer, f"{name}.{names.down}", size, bias=of.bias)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        block, both = PreNorm(self.norm, x, residual), self.gate_up
        inner, residual = both.weight.gated_product(block, both.bias, self._activation, self.down.weight)
        return self.down.forward(inner), residual


def gate_and_up(
    name: str, names: FeedForwardNames, of: FeedForwardConfig, parallel: TensorParallel
) -> list[Projection]:
    """Projections to this rank's part of the intermediate features, of a feed-forward whose tensors begin with `name`:
    gate, if it has one, and gated value."""
    size = of.intermediate_size
    parts = (names.up,) if of.activation in UNGATED else (names.gate, names.up)
    found = [Projection(f"{name}.{each}", size, parallel.shard(size)) for each in parts]
    return stacked(f"{name}.{names.fused}" if names.fused else None, found)
