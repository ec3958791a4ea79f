"""Kernels for weights of 4 bits in Triton's interpreter on a CPU, against torch: dequantization, and what the kernels
of experts begin with.

Run `python -m support.kernels.interpreted_int4`. Prints, as JSON, whether each case agrees.
"""

from __future__ import annotations

import json
import os

import torch
import torch.nn.functional as F

from minisgl.kernels.linear.int4_packed import dequantize_words, pack_scales, pack_words
from support.kernels.interpreted_cascade import allow_loops_to_a_loaded_end


def agrees(group: int) -> bool:
    from minisgl.kernels.linear.dequantize_triton import dequantize_words_cuda

    numbers = torch.randint(0, 16, (256, 384), dtype=torch.int32)
    zeros = torch.randint(0, 16, (256, 384 // group), dtype=torch.int32)
    # The interpreter cuts off what exceeds a bfloat16: with these scales nothing is rounded.
    factors = 2.0 ** -torch.randint(0, 8, (256, 384 // group))
    words, scales = pack_words(numbers), pack_scales(factors, zeros)
    return torch.equal(dequantize_words_cuda(words, scales), dequantize_words(words, scales))


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
    cases = {f"groups of {group}": agrees(group) for group in (64, 128)}
    cases |= {
        f"pairs of {tokens} tokens": agrees_on_pairs(tokens, hidden, padding)
        for tokens, hidden, padding in ((1, 128, 0), (9, 1152, 0), (3, 192, 64))
    }
    print(json.dumps(cases))
