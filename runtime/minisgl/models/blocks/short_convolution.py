"""Gated convolution of a layer over a few tokens (LFM2)."""

from __future__ import annotations

import torch

from minisgl.attention.recurrent import RecurrentStates
from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.layers.linear import ColumnParallelLinear, stacked
from minisgl.layers.weights.parameters import Parameters
from minisgl.layers.weights.weight import Projection
from minisgl.models.blocks.convolution import new_convolution
from minisgl.models.blocks.norms import norm_before
from minisgl.models.blocks.output import new_output
from minisgl.models.config import ModelConfig
from minisgl.models.decoder_config import ShortConvolutionConfig, recurrences


class ShortConvolution:
    """Every rank holds an equal part of the channels."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, parameters: Parameters, layer: int) -> None:
        of, block = config.layers[layer].attention, f"model.layers.{layer}.conv"
        assert isinstance(of, ShortConvolutionConfig)
        self._layer = len(recurrences(config.layers[:layer]))
        """Number among the layers with recurrent states."""
        part = parallel.shard(of.width)
        self.norm = norm_before(config, parameters, layer, config.decoder.names.attention_norm)
        three = stacked(f"{block}.in_proj", [Projection("", of.width, part) for _ in range(3)])
        self.inputs = ColumnParallelLinear(parameters, config.hidden_size, three, bias=of.bias)
        channels = [Projection(f"{block}.conv", of.width, part)]
        self.convolution = new_convolution(
            parameters, f"{block}.conv", channels, of.kernel_size, bias=of.bias, silu=False
        )
        self.out = new_output(config, parallel, parameters, layer, f"{block}.out_proj", of.width, bias=of.bias)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        states: RecurrentStates,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `SelfAttention.forward`; positions follow from the order of tokens."""
        x, residual = self.norm.forward(x, residual)
        before, behind, x = self.inputs.weight.product(x, self.inputs.bias).chunk(3, -1)
        out = states.mix(self._layer, before * x, self.convolution, None)
        if rows is not None:
            out, behind, residual = out[rows], behind[rows], residual[rows]
        return self.out.forward(behind * out), residual
