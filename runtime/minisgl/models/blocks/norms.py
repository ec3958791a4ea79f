"""Norms around the blocks of a layer, and where they stand."""

from __future__ import annotations

import torch

from minisgl.layers.norm import BlockNorm, ResidualSum, RMSNorm
from minisgl.layers.weights.parameters import Parameters
from minisgl.models.config import ModelConfig


class BlockEnd:
    """What happens to the output of a block before it is added to the residual stream."""

    def __init__(self, config: ModelConfig, parameters: Parameters, layer: int, name: str) -> None:
        of = config.layers[layer]
        self._norm = None
        if of.norms != "pre":
            self._norm = norm_of(config, parameters, f"model.layers.{layer}.{name}")
        self._scale = of.residual_scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._norm is not None:
            x, _ = self._norm.forward(x, None)
        return x if self._scale == 1.0 else x * self._scale


def norm_of(config: ModelConfig, parameters: Parameters, name: str) -> RMSNorm:
    return RMSNorm(parameters.replicated(f"{name}.weight", config.hidden_size), config.decoder.norm)


def norm_before(config: ModelConfig, parameters: Parameters, layer: int, name: str) -> BlockNorm:
    if config.layers[layer].norms == "post":
        return ResidualSum()
    return norm_of(config, parameters, f"model.layers.{layer}.{name}")


def norm_before_feed_forward(config: ModelConfig, parameters: Parameters, layer: int) -> BlockNorm:
    return norm_before(config, parameters, layer, config.decoder.names.feed_forward_norm)
