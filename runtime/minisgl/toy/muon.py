"""Muon: momentum whose direction is made orthogonal, for the matrices of a very small model.

The iteration runs in float32. That of torch.optim.Muon runs in bfloat16, which processors without instructions for it
multiply ten to thirty times slower: it would take three quarters of a training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import torch

_MOMENTUM: Final = 0.95
_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
"""Factors of x, x³ and x⁵, by which an iteration changes each singular value; steep at zero."""
_ITERATIONS: Final = 5


class Muon(torch.optim.Optimizer):
    def __init__(self, matrices: Iterable[torch.Tensor]) -> None:
        """`matrices` have two dimensions. The learning rate, `lr`, is that of each group."""
        super().__init__(matrices, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for matrix in group["params"]:
                state = self.state[matrix]
                if not state:
                    state["momentum"] = torch.zeros_like(matrix)
                momentum = state["momentum"].lerp_(matrix.grad, 1 - _MOMENTUM)
                # Nesterov's momentum: the gradient counts once more.
                direction = orthogonal(matrix.grad.lerp(momentum, _MOMENTUM))
                rows, columns = matrix.shape
                matrix.add_(direction, alpha=-group["lr"] * math.sqrt(max(1.0, rows / columns)))


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix with singular values of about one instead of its own: between 0.7 and 1.2 for all but very
    small ones."""
    rows, columns = matrix.shape
    x = matrix.T if rows > columns else matrix
    x = x / x.norm().clamp(min=1e-7)
    linear, cubic, quintic = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic), x, beta=linear)
    return x.T if rows > columns else x
