"""Quantization to MXFP4."""

from __future__ import annotations

import torch

from minisgl.kernels.linear.fp4_packed import CODES


def in_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[…, in] to blocks […, in / 32, 16] and scales […, in / 32], uint8 both."""
    groups = weight.float().unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30).log2().floor() - 2
    distances = (groups / exponents.exp2()).unsqueeze(-1) - torch.tensor(CODES)
    codes = distances.abs().argmin(-1).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents.squeeze(-1) + 127).to(torch.uint8)
