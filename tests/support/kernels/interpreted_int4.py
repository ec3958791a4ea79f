"""Kernels for weights of 4 bits in Triton's interpreter on a CPU, against torch: dequantization, products with groups
of 32, and what the kernels of experts begin with.

Run `python -m support.kernels.interpreted_int4`. Prints, as JSON, whether each case agrees.
"""

from __future__ import annotations

import json
import os

import torch
import torch.nn.functional as F

from minisgl.kernels.linear.int4_packed import dequantize_words, pack_scales, pack_words
from support.kernels.experts import exact_int4, in_int4
from support.kernels.interpreted_cascade import allow_loops_to_a_loaded_end


def agrees(group: int) -> bool:
    from minisgl.kernels.linear.dequantize_triton import dequantize_words_cuda

    numbers = torch.randint(0, 16, (256, 384), dtype=torch.int32)
    zeros = torch.randint(0, 16, (256, 384 // group), dtype=torch.int32)
    # The interpreter cuts off what exceeds a bfloat16: with these scales nothing is rounded.
    factors = 2.0 ** -torch.randint(0, 8, (256, 384 // group))
    words, scales = pack_words(numbers), pack_scales(factors, zeros)
    return torch.equal(dequantize_words_cuda(words, scales), dequantize_words(words, scales))


def agrees_on_a_product(rows: int, in_parts: bool) -> bool:
    from minisgl.kernels.linear.int4_choose import int4_linear, int4_tile
    from minisgl.kernels.linear.int4_skinny_triton import SkinnyTile

    # The interpreter rounds bfloat16 towards zero.
    x, weight = torch.randn(rows, 1152).half(), in_int4(torch.randn(1, 192, 1152), 32)
    tile = int4_tile(rows, 192, 1152, in_parts=in_parts, groups=4)
    # The last split has fewer steps than the other.
    assert isinstance(tile, SkinnyTile) and tile.splits == 2 and tile.each == 5
    bias = None if in_parts else torch.randn(192).half()
    ours = int4_linear(x, weight.values[0], weight.scales[0], tile, bias, in_parts=in_parts)
    exact = x.double() @ exact_int4(weight)[0].double().T
    exact = exact if bias is None else exact + bias.double()
    found = ours.double().sum(0) if in_parts else ours.double()
    return ours.dim() == (3 if in_parts else 2) and float((found - exact).norm() / exact.norm()) < 1e-3


def agrees_on_a_gated_product() -> bool:
    from minisgl.kernels.linear.int4_choose import int4_gated

    x, weight = torch.randn(5, 256).half(), in_int4(torch.randn(1, 128, 256), 32)
    ours = int4_gated(x, weight.values[0], weight.scales[0])
    gate, up = (x.double() @ exact_int4(weight)[0].double().T).chunk(2, 1)
    exact = F.silu(gate) * up
    return ours is not None and float((ours.double() - exact).norm() / exact.norm()) < 1e-3


def agrees_on_pairs(tokens: int, hidden: int, padding: int) -> bool:
    from minisgl.kernels.experts.int4_pairs_triton import pairs_and_rows

    x = torch.randn(tokens, hidden).half()
    experts = torch.stack([torch.randperm(7)[:3] for _ in range(tokens)]).int()
    # The inputs of a word's outputs, as `int4_packed` has them: two neighbours each, 8 apart.
    ordered = x.view(tokens, -1, 4, 4, 2).transpose(2, 3).reshape(tokens, hidden)
    pairs_of, counts, rows = pairs_and_rows(x, experts, 7, hidden + padding)
    found = [row[:count].tolist() for row, count in zip(pairs_of, counts.tolist(), strict=True)]
    expected = [torch.where(experts.flatten() == expert)[0].tolist() for expert in range(7)]
    return torch.equal(rows, F.pad(ordered, (0, padding))) and found == expected


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    allow_loops_to_a_loaded_end()
    torch.manual_seed(0)
    cases = {f"groups of {group}": agrees(group) for group in (32, 64, 128)}
    cases |= {f"product of {rows} rows": agrees_on_a_product(rows, rows > 16) for rows in (2, 20, 70)}
    cases |= {"gated product": agrees_on_a_gated_product()}
    cases |= {
        f"pairs of {tokens} tokens": agrees_on_pairs(tokens, hidden, padding)
        for tokens, hidden, padding in ((1, 128, 0), (9, 1152, 0), (3, 192, 64))
    }
    print(json.dumps(cases))
