"""A mixture of experts drawn by a seed, and what it gives by plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from minisgl.kernels.fp8_rows import BLOCK, E4M3_MAX
from minisgl.layers.activation import silu_and_mul
from minisgl.layers.fp8_weight import Fp8Weight
from minisgl.moe.experts import experts_one_by_one


class Sizes(NamedTuple):
    hidden: int
    width: int
    experts: int
    top_k: int


def draw(sizes: Sizes, tokens: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, gate_up and down."""
    generator = torch.Generator(device).manual_seed(tokens)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)

    x = normal(tokens, sizes.hidden)
    gate_up = normal(sizes.experts, 2 * sizes.width, sizes.hidden, scale=sizes.hidden**-0.5)
    return x, gate_up, normal(sizes.experts, sizes.hidden, sizes.width, scale=sizes.width**-0.5)


def in_fp8(weight: torch.Tensor) -> Fp8Weight:
    """[experts, out, in] in blocks, whose scales differ."""
    experts, outputs, inputs = weight.shape
    blocks = weight.float().view(experts, outputs // BLOCK, BLOCK, inputs // BLOCK, BLOCK)
    scales = blocks.abs().amax((2, 4)) / E4M3_MAX
    values = (blocks / scales[:, :, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    factors = 1 + torch.arange(scales.numel(), device=weight.device).view(scales.shape) % 7
    return Fp8Weight(values.view(weight.shape), scales * factors)


def choices(sizes: Sizes, tokens: int) -> torch.Tensor:
    """[tokens, top_k] int32, on the CPU."""
    generator = torch.Generator().manual_seed(tokens)
    picks = [torch.randperm(sizes.experts, generator=generator)[: sizes.top_k] for _ in range(tokens)]
    return torch.stack(picks).int()


def by_plain_torch(
    dtype: torch.dtype,
    x: torch.Tensor,
    shares: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Computed in `dtype`: [tokens, hidden]."""
    chosen = experts_one_by_one(x.to(dtype), experts, gate_up.to(dtype), down.to(dtype), silu_and_mul)
    return (chosen * shares.to(dtype).unsqueeze(-1)).sum(1)
