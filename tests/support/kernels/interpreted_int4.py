"""The kernel that dequantizes weights of 4 bits in Triton's interpreter on a CPU, against torch.

Run `python -m support.kernels.interpreted_int4`. Prints, as JSON, whether each group size agrees.
"""

from __future__ import annotations

import json
import os

import torch

from minisgl.kernels.int4_words import dequantize_words, pack_scales, pack_words


def agrees(group: int) -> bool:
    from minisgl.kernels.int4_dequantize_triton import dequantize_words_cuda

    numbers = torch.randint(0, 16, (256, 384), dtype=torch.int32)
    zeros = torch.randint(0, 16, (256, 384 // group), dtype=torch.int32)
    # The interpreter cuts off what exceeds a bfloat16: with these scales nothing is rounded.
    factors = 2.0 ** -torch.randint(0, 8, (256, 384 // group))
    words, scales = pack_words(numbers), pack_scales(factors, zeros)
    return torch.equal(dequantize_words_cuda(words, scales), dequantize_words(words, scales))


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    torch.manual_seed(0)
    print(json.dumps({f"groups of {group}": agrees(group) for group in (64, 128)}))
