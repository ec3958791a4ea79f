"""The kernels that quantize activations in Triton's interpreter on a CPU, against the same operations in torch,
and behind those kernels that keep bfloat16.

Run `python -m support.kernels.interpreted_fp8_rows`. Prints, as JSON, whether each case agrees.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import torch

from minisgl.kernels.pointwise.fp8_rows import Fp8Rows
from minisgl.kernels.pointwise.quantize_rows import quantize_rows

EPS = 1e-6


def same(ours: Fp8Rows, expected: torch.Tensor, *, per_row: bool = False) -> bool:
    """Equal scales, and numbers as near as torch's.

    The interpreter rounds ties up, and halves numbers that are rounded up to a power of two: it loses the carry into
    the exponent.
    """
    reference = quantize_rows(expected, per_row=per_row)
    count = ours.rows
    numbers, wanted = ours.values[:count].float(), reference.values[:count].float()
    scales = reference.scales[:, :count].T.repeat_interleave(expected.shape[1] // len(reference.scales), 1)
    exact = expected.float() / scales
    near = ((numbers - exact).abs() <= 1.001 * (wanted - exact).abs()) | (2 * numbers == wanted)
    return (
        ours.values.shape == reference.values.shape
        and torch.allclose(ours.scales[:, :count], reference.scales[:, :count], rtol=1e-5)
        and bool(near.float().mean() > 0.998)
    )


def draw(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def quantizes() -> bool:
    from minisgl.kernels.pointwise.quantize_rows_triton import quantize_rows_cuda

    wide = draw(5, 3 * 1408)
    wide[2, 1408:1536] = 0
    inputs = wide[:, 1408:2816], draw(1, 128), draw(17, 1152)
    return all(
        same(quantize_rows_cuda(x, per_row=per_row), x, per_row=per_row) for x in inputs for per_row in (False, True)
    )


def multiplies() -> bool:
    from minisgl.kernels.pointwise.activation_triton import silu_and_mul_cuda
    from minisgl.kernels.pointwise.quantize_rows_triton import silu_and_mul_fp8

    return all(
        same(silu_and_mul_fp8(x, per_row=per_row), silu_and_mul_cuda(x), per_row=per_row)
        for x in (draw(3, 2 * 1408), draw(1, 256))
        for per_row in (False, True)
    )


def normalizes() -> bool:
    from minisgl.kernels.pointwise.norm_triton import rms_norm_cuda
    from minisgl.kernels.pointwise.quantize_rows_triton import rms_norm_fp8

    results = []
    for rows, width in ((1, 128), (3, 896), (2, 5120)):
        x, residual, gain = draw(rows, width), draw(rows, width) + 1, draw(width)
        stream = residual.clone()
        ours = rms_norm_fp8(x, stream, gain, EPS)
        results += [same(ours, rms_norm_cuda(x, residual, gain, EPS)), torch.equal(stream, residual)]
        other = {"unit_offset": True, "round_last": True}
        results.append(same(rms_norm_fp8(x, None, gain, EPS, **other), rms_norm_cuda(x, None, gain, EPS, **other)))
        parts = torch.stack([draw(rows, width).float(), draw(rows, width).float() / 2])
        for each in (x, parts):
            expected = rms_norm_cuda(each, None, gain, EPS)
            results.append(same(rms_norm_fp8(each, None, gain, EPS), expected))
            results.append(same(rms_norm_fp8(each, None, gain, EPS, per_row=True), expected, per_row=True))
    return all(results)


CASES: dict[str, Callable[[], bool]] = {"rows": quantizes, "SiLU × up": multiplies, "norm": normalizes}


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    print(json.dumps({name: agrees() for name, agrees in CASES.items()}))
