"""The dense feed-forward of a layer."""

from __future__ import annotations

import torch

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.layers.activation import GATED_ACTIVATIONS
from minisgl.layers.linear import ColumnParallelLinear, RowParallelLinear, stacked
from minisgl.layers.weights.inputs import PreNorm
from minisgl.layers.weights.parameters import Parameters
from minisgl.layers.weights.weight import Projection
from minisgl.models.blocks.norms import norm_before_feed_forward, sums_in_norm
from minisgl.models.config import ModelConfig
from minisgl.models.decoder_config import FeedForwardConfig


class FeedForward:
    def __init__(
        self, config: ModelConfig, of: FeedForwardConfig, parallel: TensorParallel, parameters: Parameters, layer: int
    ) -> None:
        name, names = f"model.layers.{layer}.mlp", config.decoder.names
        size = of.intermediate_size
        self.norm = norm_before_feed_forward(config, parameters, layer)
        self._activation = GATED_ACTIVATIONS[of.activation]
        self.gate_up = ColumnParallelLinear(
            parameters,
            config.hidden_size,
            stacked(
                f"{name}.{names.fused_gate_up}" if names.fused_gate_up else None,
                [Projection(f"{name}.{part}", size, parallel.shard(size)) for part in ("gate_proj", "up_proj")],
            ),
            bias=of.bias,
        )
        self.down = RowParallelLinear(
            parameters,
            f"{name}.down_proj",
            size,
            config.hidden_size,
            parallel,
            bias=of.bias,
            in_parts=sums_in_norm(config, layer),
        )

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        block, both = PreNorm(self.norm, x, residual), self.gate_up
        inner, residual = both.weight.gated_product(block, both.bias, self._activation, self.down.weight)
        return self.down.forward(inner), residual
