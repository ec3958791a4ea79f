"""Models in float32 with the rounding of quantized inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

from minisgl.kernels.pointwise.fp8_rows import Fp8Rows, dequantize_rows
from minisgl.kernels.pointwise.quantize_rows import quantize_rows
from minisgl.layers.weights.dense import DenseWeight
from minisgl.layers.weights.fp8 import Fp8Weight
from minisgl.layers.weights.inputs import Input, wide
from minisgl.layers.weights.weight import Weight
from minisgl.models.blocks.feed_forward import FeedForward
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder
from support.numerics.ranks import load


def fake_quantized(
    checkpoint: Path,
    config: ModelConfig | None = None,
    *,
    per_row: bool = False,
    recorded: list[torch.Tensor] | None = None,
) -> Decoder:
    """A model on a CPU with dequantized weights, whose linear layers round their inputs to FP8 in blocks of 128, or
    `per_row`. `config`: that of the checkpoint by default.

    `recorded`: the rounded inputs of another model's layers, in order. They replace those of this model, after a check
    that they are as near to the exact inputs as its own. Rounding in 16 bits moves an input by 1/16 of a step of FP8,
    which changes the direction of one rounding in thirty; after two layers the errors of two models that round by
    themselves have little in common, and a comparison of them would show nothing.
    """
    model = load(checkpoint, config=config)
    order = None if recorded is None else iter(recorded)
    for layer in model.layers:
        assert isinstance(layer.feed_forward, FeedForward)
        layers = layer.attention.qkv, layer.attention.out, layer.feed_forward.gate_up, layer.feed_forward.down
        for each in layers:
            assert isinstance(each.weight, DenseWeight)
            each.weight = Rounding(each.weight.values, per_row, order)
    return model


@contextmanager
def record_quantized_inputs() -> Iterator[list[torch.Tensor]]:
    """Record the rounded inputs of each product with an FP8 weight: float32 on the CPU, in the order of products."""
    recorded: list[torch.Tensor] = []

    product = Fp8Weight.product

    def recording(
        weight: Fp8Weight, x: Input, bias: torch.Tensor | None = None, *, in_parts: bool = False
    ) -> torch.Tensor:
        rows = x if isinstance(x, Fp8Rows) else quantize_rows(x, per_row=weight.per_channel)
        recorded.append(dequantize_rows(rows).float().cpu())
        return product(weight, x, bias, in_parts=in_parts)

    with mock.patch.object(Fp8Weight, "product", recording):
        yield recorded


@dataclass(frozen=True, eq=False)
class Rounding(Weight):
    """A weight in the model's dtype whose product rounds its input to FP8."""

    values: torch.Tensor
    per_row: bool
    order: Iterator[torch.Tensor] | None

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        return self.values.to(dtype)

    def product(self, x: Input, bias: torch.Tensor | None = None, *, in_parts: bool = False) -> torch.Tensor:
        x = wide(x)
        rounded = dequantize_rows(quantize_rows(x, per_row=self.per_row))
        if self.order is not None:
            theirs = next(self.order)
            assert (theirs - x).norm() <= 1.05 * (rounded - x).norm(), (
                "the recorded inputs are not these, rounded to FP8"
            )
            rounded = theirs
        return F.linear(rounded, self.values, bias)
