"""The experts' kernels by Triton's interpreter, against float64: `python -m support.interpreted_experts`.

Prints, as JSON, the error of each case, relative to the result.
"""

from __future__ import annotations

import json
import math
from typing import NamedTuple

import torch

from support.interpreted_cascade import allow_loops_to_a_loaded_end


class Case(NamedTuple):
    tokens: int
    experts: int = 6
    top_k: int = 2
    hidden: int = 128
    width: int = 64
    crowded: bool = False
    """All tokens choose the same experts."""


CASES = {
    "one token": Case(1),
    "experts that nobody chose": Case(3, experts=16, top_k=4),
    "a third of a rank's width": Case(9, width=96, hidden=256),
    "more tokens of an expert than a tile has": Case(40, experts=16, crowded=True),
    "tiles of 32 tokens": Case(40),
    "tiles of 64 tokens": Case(90, experts=8, crowded=True),
    "tiles of 128 tokens": Case(150, experts=4),
}


def error(case: Case) -> float:
    from minisgl.kernels.experts_triton import fits, run_experts_cuda
    from minisgl.layers.activation import silu_and_mul
    from minisgl.moe.experts import experts_one_by_one

    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        # The interpreter rounds bfloat16 towards zero.
        return (torch.randn(*shape, generator=draw) / math.sqrt(shape[-1])).half()

    x = normal(case.tokens, case.hidden) * case.hidden**0.5
    gate_up = normal(case.experts, 2 * case.width, case.hidden)
    down = normal(case.experts, case.hidden, case.width)
    picks = [torch.randperm(case.experts, generator=draw)[: case.top_k] for _ in range(case.tokens)]
    experts = torch.stack(picks[:1] * case.tokens if case.crowded else picks).int()
    shares = torch.rand(experts.shape, generator=draw).half()
    assert fits(x, gate_up)
    ours = run_experts_cuda(x, shares, experts, gate_up, down)
    chosen = experts_one_by_one(x.double(), experts, gate_up.double(), down.double(), silu_and_mul)
    exact = (chosen * shares.double().unsqueeze(-1)).sum(1)
    return float((ours.double() - exact).norm()) / float(exact.norm())


if __name__ == "__main__":
    allow_loops_to_a_loaded_end()
    print(json.dumps({name: error(case) for name, case in CASES.items()}))
