"""LayerNorm in Triton's interpreter on a CPU, against the same operations in torch.

Run `python -m support.kernels.interpreted_layer_norm`. Prints, as JSON, whether each case agrees.
"""

from __future__ import annotations

import json
import os

import torch

CASES = [
    f"{width} {kind}{' + residual' if adds else ''}{' + bias' if biased else ''}"
    for width in (128, 384, 1000)
    for kind in ("float32", "bfloat16")
    for adds in (False, True)
    for biased in (False, True)
]


def agrees(case: str) -> bool:
    from minisgl.kernels.pointwise.layer_norm_triton import layer_norm_cuda
    from minisgl.kernels.pointwise.norm import add_layer_norm

    width, kind, *rest = case.replace("+ ", "").split()
    dtype, generator = getattr(torch, kind), torch.Generator().manual_seed(int(width))
    x, residual = (torch.randn(3, int(width), generator=generator).to(dtype) * 3 + 1 for _ in range(2))
    gain, bias = (torch.randn(int(width), generator=generator).to(dtype) for _ in range(2))
    stream, shift = residual if "residual" in rest else None, bias if "bias" in rest else None
    expected, total = add_layer_norm(x.clone(), stream, gain, shift, 1e-5)
    found = layer_norm_cuda(x, stream, gain, shift, 1e-5)
    # The interpreter rounds ties another way.
    rounding = 1e-5 if dtype == torch.float32 else 2**-6
    return torch.allclose(found, expected, rtol=rounding, atol=rounding) and torch.allclose(x, total, rtol=rounding)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    print(json.dumps({case: agrees(case) for case in CASES}))
