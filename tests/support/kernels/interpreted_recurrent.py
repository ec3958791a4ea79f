"""The kernels of recurrent states for rows that decode, in Triton's interpreter on a CPU, against the same in torch.

Run `python -m support.kernels.interpreted_recurrent`. Prints, as JSON, the largest difference of each case, in outputs
and in all states.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import torch

from minisgl.attention.gated_delta import GatedDeltaRule
from minisgl.attention.mamba2 import Mamba2Rule
from minisgl.kernels.attention.causal_convolution import convolve_rows
from minisgl.kernels.attention.gated_delta import NORM_EPS

PLACES, ROWS = 7, 4
SLOTS = (5, 0, 3, 2)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1]))


def difference(
    states: torch.Tensor, ours: Callable[[torch.Tensor], torch.Tensor], theirs: Callable[[torch.Tensor], torch.Tensor]
) -> float:
    """Largest difference of results, and of what becomes of `states`."""
    copies = states.clone(), states.clone()
    found, expected = ours(copies[0]), theirs(copies[1])
    return max(float((found - expected).abs().max()), float((copies[0] - copies[1]).abs().max()))


def convolution(channels: int, taps: int, *, bias: bool, silu: bool) -> float:
    from minisgl.kernels.attention.recurrent_decode_triton import convolve_rows_cuda

    # Rows of a wider product, as projections are.
    x, weight, slots = draw(ROWS, channels + 5)[:, :channels], draw(channels, taps), torch.tensor(SLOTS)
    added = draw(channels) if bias else None
    return difference(
        draw(PLACES, taps - 1, channels),
        lambda inputs: convolve_rows_cuda(x, inputs, slots, weight, added, silu=silu),
        lambda inputs: convolve_rows(x, inputs, slots, weight, added, silu=silu),
    )


def gated_delta(key_heads: int, heads: int, key: int, value: int) -> float:
    from minisgl.kernels.attention.recurrent_decode_triton import gated_delta_rows_cuda

    mixed, slots = draw(ROWS, 2 * key_heads * key + heads * value), torch.tensor(SLOTS)
    gates = torch.rand(ROWS, 2 * heads, generator=torch.Generator().manual_seed(1))
    decay, step = -gates[:, :heads], gates[:, heads:]
    rule = GatedDeltaRule(key_heads, heads, key, value)
    return difference(
        draw(PLACES, heads, key, value),
        lambda states: gated_delta_rows_cuda(mixed, decay, step, states, slots, key_heads, NORM_EPS),
        lambda states: rule.one_token(mixed, (decay, step), states, slots),
    )


def mamba2(groups: int, heads: int, key: int, value: int) -> float:
    from minisgl.kernels.attention.recurrent_decode_triton import mamba2_rows_cuda

    mixed, slots = draw(ROWS, heads * value + 2 * groups * key), torch.tensor(SLOTS)
    step = torch.rand(ROWS, heads, generator=torch.Generator().manual_seed(1))
    log_decay, skip = draw(heads) - 1, draw(heads)
    rule = Mamba2Rule(heads, groups, log_decay, skip)
    return difference(
        draw(PLACES, heads, key, value),
        lambda states: mamba2_rows_cuda(mixed, step, log_decay, skip, states, slots, groups),
        lambda states: rule.one_token(mixed, (step,), states, slots),
    )


CASES: dict[str, Callable[[], float]] = {
    "convolution of Qwen3.5": lambda: convolution(300, 4, bias=False, silu=True),
    "convolution of Nemotron": lambda: convolution(256, 4, bias=True, silu=True),
    "convolution of LFM2": lambda: convolution(40, 3, bias=True, silu=False),
    "gated delta rule": lambda: gated_delta(2, 4, 128, 128),
    "gated delta rule of odd sizes": lambda: gated_delta(1, 3, 24, 40),
    "mamba-2": lambda: mamba2(2, 4, 128, 64),
    "mamba-2 of odd sizes": lambda: mamba2(1, 3, 12, 40),
}

if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    print(json.dumps({name: case() for name, case in CASES.items()}))
