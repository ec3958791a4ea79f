"""Angles of rotary position embedding."""

from __future__ import annotations

import math

import torch

from minisgl.layers.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, dims: int, max_position: int = 0) -> torch.Tensor:
    """[dims / 2] float32 on the CPU: radians per position of each pair of rotated dimensions. `max_position`: number of
    positions that sequences may have, which decides the kind of longrope."""
    exponents = torch.arange(0, dims, 2, dtype=torch.float32) / dims
    if rope.kind == "longrope":
        # One kind for all sequences, so that stored keys stay valid while a sequence grows.
        factors = rope.long_factors if max_position > rope.original_max_position else rope.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**exponents)
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "proportional":
        frequencies[int(rope.rotated_share * dims) // 2 :] = 0
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, frequencies, dims)
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

    def __init__(self, rope: RopeConfig | None, head_dim: int, max_position: int, device: torch.device) -> None:
        """Without `rope` nothing is rotated: all angles are 0."""
        dims = 0 if rope is None else rope.rotated_dims(head_dim)
        cos, sin = torch.ones(max_position, head_dim // 2), torch.zeros(max_position, head_dim // 2)
        if rope is not None:
            frequencies = inverse_frequencies(rope, dims, max_position)
            angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
            cos[:, : dims // 2] = angles.cos() * rope.attention_factor
            sin[:, : dims // 2] = angles.sin() * rope.attention_factor
        self._cos_sin = torch.cat((cos, sin), dim=-1).to(device)

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """[T] integer positions to [T, head_dim] float32: cos of the head_dim / 2 angles, then sin.

        They are gathered once per step and shared by all layers.
        """
        return torch.index_select(self._cos_sin, 0, positions)
