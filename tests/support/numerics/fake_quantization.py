"""Models in float32 with the rounding of quantized inputs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from minisgl.kernels.fp8_rows import dequantize_rows
from minisgl.kernels.quantize_rows import quantize_rows
from minisgl.layers.linear import linear
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder, FeedForward
from support.numerics.ranks import load


def fake_quantized(checkpoint: Path, config: ModelConfig | None = None, *, per_row: bool = False) -> Decoder:
    """A model on a CPU with dequantized weights, whose linear layers round their inputs to FP8 in blocks of 128, or
    `per_row`. `config`: that of the checkpoint by default."""
    model = load(checkpoint, config=config)
    for layer in model.layers:
        assert isinstance(layer.feed_forward, FeedForward)
        layers = layer.attention.qkv, layer.attention.out, layer.feed_forward.gate_up, layer.feed_forward.down
        for each in layers:
            assert isinstance(each.weight, torch.Tensor)
            each.forward = partial(_product, each.weight, each.bias, per_row)  # type: ignore[method-assign]
    return model


def _product(weight: torch.Tensor, bias: torch.Tensor | None, per_row: bool, x: torch.Tensor) -> torch.Tensor:
    return linear(dequantize_rows(quantize_rows(x, per_row=per_row)), weight, bias)
