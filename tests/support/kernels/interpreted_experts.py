"""The experts' kernels by Triton's interpreter, against float64: `python -m support.kernels.interpreted_experts`.

Prints, as JSON, the error of each case, relative to the result.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import torch
import torch.nn.functional as F

from minisgl.kernels.experts.gate import GELU_TANH, RELU_SQUARED, SILU, Gate
from minisgl.layers.activation import (
    ClampedGate,
    FeedForwardActivation,
    gelu_tanh_and_mul,
    relu_squared,
    silu_and_mul,
)
from minisgl.layers.weights.allocate import ExpertBiases
from minisgl.layers.weights.mxfp4 import Mxfp4Weight
from support.kernels.experts import Sizes, by_plain_torch, choices, draw, exact_int4, in_fp8, in_int4, in_mxfp4
from support.kernels.interpreted_cascade import allow_loops_to_a_loaded_end


class Case(NamedTuple):
    tokens: int
    sizes: Sizes = Sizes(hidden=128, width=64, experts=6, top_k=2)
    crowded: bool = False
    """All tokens choose the same experts."""
    fp8: bool = False
    """Weights are in FP8 blocks."""
    int4: int = 0
    """Weights have 4 bits, in groups of so many inputs."""
    mxfp4: bool = False
    clamped: bool = False
    """The activation is gpt-oss's, and both projections have biases."""
    gelu: bool = False
    gated: bool = True


DEFAULT = Case(1).sizes
HALF_PIECES = Sizes(hidden=192, width=96, experts=6, top_k=2)
"""Neither is a multiple of 128, nor the width of 64."""
IN_BLOCKS = Sizes(hidden=256, width=128, experts=16, top_k=2)
CASES = {
    "one token": Case(1),
    "experts that nobody chose": Case(3, DEFAULT._replace(experts=16, top_k=4)),
    "a third of a rank's width": Case(9, DEFAULT._replace(width=96, hidden=256)),
    "more tokens of an expert than a tile has": Case(40, DEFAULT._replace(experts=16), crowded=True),
    "tiles of 32 tokens": Case(40),
    "tiles of 64 tokens": Case(90, DEFAULT._replace(experts=8), crowded=True),
    "tiles of 128 tokens": Case(150, DEFAULT._replace(experts=4)),
    "one token, FP8": Case(1, IN_BLOCKS, fp8=True),
    "more tokens of an expert than a tile has, FP8": Case(40, IN_BLOCKS, crowded=True, fp8=True),
    "tiles of 32 tokens, FP8": Case(40, IN_BLOCKS._replace(experts=6), fp8=True),
    "one token, INT4": Case(1, IN_BLOCKS, int4=128),
    "more tokens of an expert than a tile has, INT4": Case(40, IN_BLOCKS, crowded=True, int4=128),
    "groups of 64, INT4": Case(40, IN_BLOCKS._replace(experts=6), int4=64),
    "groups of 32, INT4": Case(9, IN_BLOCKS._replace(experts=6), int4=32),
    "biases and a clamped activation": Case(9, DEFAULT._replace(hidden=256), clamped=True),
    "GELU": Case(9, DEFAULT._replace(hidden=256), gelu=True),
    "no gate": Case(9, DEFAULT._replace(width=192, hidden=256), gated=False),
    "no gate, tiles of 64 tokens": Case(90, DEFAULT._replace(experts=8), crowded=True, gated=False),
    "one token, MXFP4": Case(1, HALF_PIECES, mxfp4=True, clamped=True),
    "more tokens of an expert than a tile has, MXFP4": Case(40, HALF_PIECES, crowded=True, mxfp4=True, clamped=True),
    "tiles of 32 tokens, MXFP4": Case(40, IN_BLOCKS._replace(experts=6), mxfp4=True),
}


def error(case: Case) -> float:
    from minisgl.kernels.experts.grouped_gemm_triton import Scales, fits, run_experts_cuda

    # The interpreter rounds bfloat16 towards zero.
    x, gate_up, down = draw(case.sizes, case.tokens, torch.float16, "cpu")
    experts = choices(case.sizes, case.tokens)
    if case.crowded:
        experts[:] = experts[0].clone()
    shares = torch.rand(experts.shape, generator=torch.Generator().manual_seed(0)).half()
    gate, biases = SILU, None
    activation: FeedForwardActivation = silu_and_mul
    if case.gelu:
        gate, activation = GELU_TANH, gelu_tanh_and_mul
    if not case.gated:
        gate, activation, gate_up = RELU_SQUARED, relu_squared, gate_up[:, : case.sizes.width].contiguous()
    if case.clamped:
        activation = ClampedGate(alpha=1.7, limit=0.8)
        gate = Gate(1.7, 0.8)
        generator = torch.Generator().manual_seed(1)
        outputs = gate_up.shape[1], case.sizes.hidden
        biases = ExpertBiases(*(torch.randn(len(down), each, generator=generator).half() for each in outputs))
    if case.fp8:
        fp8_gate_up, fp8_down = in_fp8(gate_up), in_fp8(down)
        assert fits(x, fp8_down.values)
        scales = Scales(fp8_gate_up.scales, fp8_down.scales)
        ours = run_experts_cuda(x, shares, experts, fp8_gate_up.values, fp8_down.values, scales)
        gate_up, down = (each.dequantized(torch.float32) for each in (fp8_gate_up, fp8_down))
    elif case.int4:
        int4_gate_up, int4_down = in_int4(gate_up, case.int4), in_int4(down, case.int4)
        assert fits(x, int4_down.values)
        scales = Scales(int4_gate_up.scales, int4_down.scales)
        ours = run_experts_cuda(x, shares, experts, int4_gate_up.values, int4_down.values, scales)
        gate_up, down = exact_int4(int4_gate_up), exact_int4(int4_down)
    elif case.mxfp4:
        width = case.sizes.width
        fp4_gate_up, fp4_down = in_mxfp4(gate_up, 2), in_mxfp4(down)
        scales = Scales(fp4_gate_up.scales, fp4_down.scales)
        assert fits(x, fp4_down.values, padded=True)
        padded = None
        if biases is not None:
            pad = (0, -width % Mxfp4Weight.row_multiple)
            halves = [F.pad(half, pad) for half in biases.gate_up.chunk(2, dim=1)]
            padded = torch.cat(halves, dim=1), biases.down
        ours = run_experts_cuda(x, shares, experts, fp4_gate_up.values, fp4_down.values, scales, gate, padded)
        gate_up = torch.cat([each[:, :width] for each in fp4_gate_up.dequantized(torch.float32).chunk(2, 1)], 1)
        down = fp4_down.dequantized(torch.float32)
    else:
        assert fits(x, down)
        ours = run_experts_cuda(x, shares, experts, gate_up, down, None, gate, biases)
    exact = by_plain_torch(torch.double, x, shares, experts, gate_up, down, activation=activation, biases=biases)
    return float((ours.double() - exact).norm()) / float(exact.norm())


if __name__ == "__main__":
    allow_loops_to_a_loaded_end()
    print(json.dumps({name: error(case) for name, case in CASES.items()}))
