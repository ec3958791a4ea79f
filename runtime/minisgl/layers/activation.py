"""Activations of feed-forwards. Gated ones are act(gate) * up, with gate and up side by side in the last dimension
(arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

FeedForwardActivation = Callable[[torch.Tensor], torch.Tensor]
"""[..., 2 n] to [..., n], or without a gate [..., n]."""


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    if gate_up.is_cuda and gate_up.dim() == 2 and gate_up.is_contiguous():
        from minisgl.kernels.pointwise.activation_triton import silu_and_mul_cuda

        return silu_and_mul_cuda(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate) * up


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    if gate_up.is_cuda and gate_up.dim() == 2 and gate_up.is_contiguous():
        from minisgl.kernels.pointwise.activation_triton import silu_and_mul_cuda

        return silu_and_mul_cuda(gate_up, gelu=True)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


@dataclass(frozen=True)
class ClampedGate:
    """gate · sigmoid(alpha · gate) · (up + 1), with gate up to `limit` and up from −`limit` to `limit`."""

    alpha: float
    limit: float

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(gate * self.alpha) * (up + 1)


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """Without a gate: [..., n] to [..., n] (arXiv:2109.08668)."""
    if x.is_cuda and x.dim() == 2 and x.is_contiguous():
        from minisgl.kernels.pointwise.activation_triton import relu_squared_cuda

        return relu_squared_cuda(x)
    return F.relu(x).square()


ACTIVATIONS: Final[Mapping[str, FeedForwardActivation]] = {
    "silu": silu_and_mul,
    "gelu": gelu_and_mul,
    "gelu_tanh": gelu_tanh_and_mul,
    "relu2": relu_squared,
}
