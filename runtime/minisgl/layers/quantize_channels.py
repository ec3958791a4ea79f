"""Quantization of weights while they are loaded."""

from __future__ import annotations

from typing import NamedTuple

import torch

from minisgl.kernels.fp8_rows import E4M3_MAX, SMALLEST


class QuantizedChannels(NamedTuple):
    values: torch.Tensor
    """[out, in] float8_e4m3fn."""
    scales: torch.Tensor
    """[out, 1] float32."""


def quantize_channels(weight: torch.Tensor) -> QuantizedChannels:
    """Quantize a weight [out, in] of any float type to FP8 with one scale per output channel, so that the largest value
    of a channel becomes 448. Raises ValueError when a value is not finite."""
    wide = weight.float()
    scales = wide.abs().amax(1, keepdim=True).clamp(min=SMALLEST) / E4M3_MAX
    if not bool(scales.isfinite().all()):
        raise ValueError("it has values that are not finite")
    return QuantizedChannels((wide / scales).to(torch.float8_e4m3fn), scales)
