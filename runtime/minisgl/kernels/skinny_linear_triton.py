# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""x W^T for a few rows on CUDA. Such a product is one read of W, and cuBLAS is far from memory bandwidth there: too few
of its large tiles are in flight. Tile sizes are those of benchmarks/results/2026-11-21-h100-skinny-gemm."""

import torch
import triton
import triton.language as tl

MAX_ROWS = 8

_VECTOR_ROWS = 4
_VECTOR_OUTPUTS = 2048
"""With so few outputs there are too few tiles for the tensor cores' kernel to fill the GPU."""
_VECTOR_TILE = (2, 1024)
_MATRIX_TILE = (16, 128)
_TENSOR_CORE_ROWS = 16


@triton.jit
def _vector(x, weight, out, inputs, outputs, rows, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Each program: BLOCK_N outputs of all rows, multiplied and added in registers."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, BLOCK_N, BLOCK_K), tl.float32)
    for start in range(0, inputs, BLOCK_K):
        tile = tl.load(weight + n[:, None].to(tl.int64) * inputs + start + k[None, :], n[:, None] < outputs, other=0.0)
        part = tl.load(x + m[:, None] * inputs + start + k[None, :], m[:, None] < rows, other=0.0)
        total += tile.to(tl.float32)[None, :, :] * part.to(tl.float32)[:, None, :]
    place = out + m[:, None] * outputs + n[None, :]
    mask = (m[:, None] < rows) & (n[None, :] < outputs)
    tl.store(place, tl.sum(total, 2).to(out.dtype.element_ty), mask)


@triton.jit
def _matrix(x, weight, out, inputs, outputs, rows, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Each program: BLOCK_N outputs of all rows, which are padded to what the tensor cores want."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m = tl.arange(0, ROWS)
    total = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for start in range(0, inputs, BLOCK_K):
        tile = tl.load(weight + n[:, None].to(tl.int64) * inputs + start + k[None, :], n[:, None] < outputs, other=0.0)
        part = tl.load(x + m[None, :] * inputs + start + k[:, None], m[None, :] < rows, other=0.0)
        total = tl.dot(tile, part, total)
    mask = (m[None, :] < rows) & (n[:, None] < outputs)
    tl.store(out + m[None, :] * outputs + n[:, None], total.to(out.dtype.element_ty), mask)


def fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `skinny_linear` serves the product of these."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and 0 < len(x) <= MAX_ROWS
        and weight.shape[1] % _VECTOR_TILE[1] == 0
        and x.is_contiguous()
        and weight.is_contiguous()
    )


def skinny_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` [M, K] and `weight` [N, K] that fit, to [M, N]; summed in float32."""
    rows, inputs = x.shape
    outputs = len(weight)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if rows == 1 or (rows <= _VECTOR_ROWS and outputs <= _VECTOR_OUTPUTS):
        block_n, block_k = _VECTOR_TILE
        _vector[(triton.cdiv(outputs, block_n),)](
            x, weight, out, inputs, outputs, rows, ROWS=triton.next_power_of_2(rows), BLOCK_N=block_n,
            BLOCK_K=block_k, num_warps=4,
        )  # fmt: skip
    else:
        block_n, block_k = _MATRIX_TILE
        _matrix[(triton.cdiv(outputs, block_n),)](
            x, weight, out, inputs, outputs, rows, ROWS=_TENSOR_CORE_ROWS, BLOCK_N=block_n, BLOCK_K=block_k,
            num_warps=2, num_stages=6,
        )  # fmt: skip
    return out
