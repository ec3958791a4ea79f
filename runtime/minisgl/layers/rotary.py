"""Angles of rotary position embedding."""

from __future__ import annotations

import math

import torch

from minisgl.layers.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float32 on the CPU: radians per position of each pair of dimensions."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, frequencies, head_dim)
    return frequencies


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Keep wavelengths that pre-training saw many periods of, stretch long ones, and blend between them."""
    periods = rope.original_max_position * frequencies / (2 * math.pi)
    keep = (periods - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0, 1)
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


def _yarn(rope: RopeConfig, frequencies: torch.Tensor, head_dim: int) -> torch.Tensor:
    """NTK by parts (arXiv:2309.00071, 3.2): the blend is linear in the dimension between two rotation counts."""

    def dimension_of(rotations: float) -> float:
        period = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(period) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    stretch = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return stretch * frequencies / rope.factor + (1 - stretch) * frequencies


class Rotary:
    """cos and sin of every position, computed once in float32."""

    def __init__(self, rope: RopeConfig, head_dim: int, max_position: int, device: torch.device) -> None:
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inverse_frequencies(rope, head_dim))
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor
        self._cos_sin = table.to(device)

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """[T] integer positions to [T, head_dim] float32: cos of the head_dim / 2 angles, then sin.

        They are gathered once per step and shared by all layers.
        """
        return torch.index_select(self._cos_sin, 0, positions)
