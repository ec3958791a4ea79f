"""x W^T for a few rows on CUDA. Such a product is one read of W, and cuBLAS does not reach memory bandwidth (0.24 to
0.5 of it for Qwen3-0.6B on an H100): too few of its large tiles are in flight.

With very few rows a launch costs as much as the work. Each program then holds its whole part of W in registers, which
it reads while the previous kernels still run. For one row the kernel also computes the operations around the product:
the addition to the residual stream and its norm before it, SiLU × up behind it.
"""

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch.dependent_launch_triton import dependent_launch, start_next, wait_for_previous
from minisgl.kernels.pointwise.activation_triton import silu_times_up

MAX_ROWS = 8
_NORMED_INPUTS = 5120
"""Most inputs of a fused norm. Every program normalizes x: with more inputs, or several rows, that exceeds a launch."""

_VECTOR_ROWS = 4
_VECTOR_OUTPUTS = 2048
"""Outputs up to which the tensor-core kernel has too few tiles to fill the GPU."""
_FEW_OUTPUTS = 128
"""Outputs up to which that holds for any number of rows."""
_FEW_OUTPUTS_INPUTS = 6144
"""Most inputs with few outputs: with more, 8 rows exceed the registers of a thread."""
_VECTOR_INPUTS = 32_768
_INPUTS_MULTIPLE = 128
"""Inputs per tile of the tensor-core kernel, which has no mask for them."""
_VECTOR_INPUTS_MULTIPLE = 64
"""Of the other kernel: rows of W that begin at a cache line."""
_WEIGHT_REGISTERS = 80
"""Registers of a thread for its part of W; more would allow too few threads."""
_PROGRAMS = 256
"""Programs: about two per multiprocessor of a Hopper GPU."""
_WARP_INPUTS = 256
"""Inputs of a warp, so that each thread reads 16 bytes at a time."""
_LONG_INPUTS = 8192
"""Inputs from which 8 warps share a tile."""
_SHORT_INPUTS = 2048
"""Inputs up to which 2 warps share a tile of a small product without a norm."""
_FEW_OUTPUTS_EACH = 2
"""Most outputs of a program with long inputs, or in a product of up to `_VECTOR_OUTPUTS` outputs without a norm."""
_MATRIX_TILE = (16, _INPUTS_MULTIPLE)
_TENSOR_CORE_ROWS = 16


@triton.jit
def _tile(weight, n, outputs, BEGIN: tl.constexpr, INPUTS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load [outputs, inputs] of W from input BEGIN on."""
    k = BEGIN + tl.arange(0, BLOCK_K)
    mask = n[:, None] < outputs
    if BEGIN + BLOCK_K > INPUTS:
        mask = mask & (k[None, :] < INPUTS)
    return tl.load(weight + n[:, None].to(tl.int64) * INPUTS + k[None, :], mask, other=0.0)


@triton.jit
def _part(row, there, BEGIN: tl.constexpr, INPUTS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load [inputs] of a row from input BEGIN on; zeros unless `there`."""
    k = BEGIN + tl.arange(0, BLOCK_K)
    return tl.load(row + k, (k < INPUTS) & there, other=0.0)


@triton.jit
def _normed(
    parts, gains, eps, INPUTS: tl.constexpr, BLOCK_K: tl.constexpr, TILES: tl.constexpr, ROUND_LAST: tl.constexpr
):  # fmt: skip
    """RMSNorm of a row, rounded where separate operations would round. ROUND_LAST: behind the gain alone."""
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for i in tl.static_range(TILES):
        squares += parts[i].to(tl.float32) * parts[i].to(tl.float32)
    scale = tl.rsqrt(tl.sum(squares, 0) / INPUTS + eps)
    normed = ()
    for i in tl.static_range(TILES):
        value = parts[i].to(tl.float32) * scale
        if not ROUND_LAST:
            value = value.to(parts[i].dtype).to(tl.float32)
        normed = normed + ((value * gains[i].to(tl.float32)).to(parts[i].dtype),)
    return normed


@triton.jit
def _product(tiles, parts, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TILES: tl.constexpr):
    """Products of a row with W: [outputs] in float32."""
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for i in tl.static_range(TILES):
        total += tiles[i].to(tl.float32) * parts[i].to(tl.float32)[None, :]
    return tl.sum(total, 1)


@triton.jit
def _bias(bias, n, outputs, BLOCK_N: tl.constexpr, BIAS: tl.constexpr):
    """Load the bias [outputs] in float32; zeros without one."""
    if BIAS:
        return tl.load(bias + n, n < outputs, other=0.0).to(tl.float32)
    return tl.zeros((BLOCK_N,), tl.float32)


@triton.jit(do_not_specialize=["outputs", "rows"])
def _vector(
    x, residual, gain, weight, bias, out, stream, kept, outputs, rows, eps,
    INPUTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr,
    ROUND_LAST: tl.constexpr, ADD: tl.constexpr, KEEP: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Each program: BLOCK_N outputs of all rows, multiplied and added in registers. A gated program has the gates of
    its outputs in the first `outputs` rows of W, and the gated values in the rows behind them; the bias likewise."""
    TILES: tl.constexpr = (INPUTS + BLOCK_K - 1) // BLOCK_K
    program = tl.program_id(0)
    n = program * BLOCK_N + tl.arange(0, BLOCK_N)
    tiles = ()
    for i in tl.static_range(TILES):
        tiles = tiles + (_tile(weight, n, outputs, i * BLOCK_K, INPUTS, BLOCK_K),)
    ups = ()
    if GATED:
        behind = weight + outputs.to(tl.int64) * INPUTS
        for i in tl.static_range(TILES):
            ups = ups + (_tile(behind, n, outputs, i * BLOCK_K, INPUTS, BLOCK_K),)
    gains = ()
    if NORM:
        for i in tl.static_range(TILES):
            gains = gains + (_part(gain, True, i * BLOCK_K, INPUTS, BLOCK_K),)
    shift = _bias(bias, n, outputs, BLOCK_N, BIAS)
    up_shift = _bias(bias + outputs, n, outputs, BLOCK_N, BIAS and GATED)
    start_next(PDL)
    wait_for_previous(PDL)

    # Read all rows before using any: one memory latency takes as long as the rest of the work.
    parts = ()
    for row in tl.static_range(ROWS):
        mine = ()
        for i in tl.static_range(TILES):
            part = _part(x + row * INPUTS, row < rows, i * BLOCK_K, INPUTS, BLOCK_K)
            if ADD:
                part = part.to(tl.float32) + _part(
                    residual + row * INPUTS, row < rows, i * BLOCK_K, INPUTS, BLOCK_K
                ).to(tl.float32)
                part = part.to(x.dtype.element_ty)
                k = i * BLOCK_K + tl.arange(0, BLOCK_K)
                # To memory other than the old stream's, which other programs may not have read yet.
                tl.store(stream + row * INPUTS + k, part, (k < INPUTS) & (row < rows) & (program == 0))
            mine = mine + (part,)
        parts = parts + (mine,)
    for row in tl.static_range(ROWS):
        mine = parts[row]
        if NORM:
            mine = _normed(mine, gains, eps, INPUTS, BLOCK_K, TILES, ROUND_LAST)
            if KEEP:
                for i in tl.static_range(TILES):
                    k = i * BLOCK_K + tl.arange(0, BLOCK_K)
                    tl.store(kept + row * INPUTS + k, mine[i], (k < INPUTS) & (row < rows) & (program == 0))
        value = (_product(tiles, mine, BLOCK_N, BLOCK_K, TILES) + shift).to(out.dtype.element_ty)
        if GATED:
            value = silu_times_up(value, _product(ups, mine, BLOCK_N, BLOCK_K, TILES) + up_shift, value.dtype)
        tl.store(out + row * outputs + n, value, (n < outputs) & (row < rows))


@triton.jit(do_not_specialize=["rows"])
def _matrix(
    x, weight, bias, out, outputs, rows,
    INPUTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Each program: BLOCK_N outputs of all rows, padded to a tensor-core product. It is not launched early: its
    programs are few, and those that start early crowd on the multiprocessors that become free first."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m = tl.arange(0, ROWS)
    total = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        tile = tl.load(weight + n[:, None].to(tl.int64) * INPUTS + start + k[None, :], n[:, None] < outputs, other=0.0)
        part = tl.load(x + m[None, :] * INPUTS + start + k[:, None], m[None, :] < rows, other=0.0)
        total = tl.dot(tile, part, total)
    total += _bias(bias, n, outputs, BLOCK_N, BIAS)[:, None]
    mask = (m[None, :] < rows) & (n[:, None] < outputs)
    tl.store(out + m[None, :] * outputs + n[:, None], total.to(out.dtype.element_ty), mask)


def fits(x: torch.Tensor, weight: torch.Tensor, *, in_registers: bool = False, normed: bool = False) -> bool:
    """Whether `skinny_linear` supports this product and, if asked, computes it without tensor cores, or `normed_linear`
    supports it. Without tensor cores W may also be in float32."""
    vector = _in_registers(len(x), *weight.shape)
    if not vector and (in_registers or weight.dtype != x.dtype):
        return False
    if (normed and (len(x) > 1 or weight.shape[1] > _NORMED_INPUTS)):
        return False
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and 0 < len(x) <= MAX_ROWS
        and weight.shape[1] % (_VECTOR_INPUTS_MULTIPLE if vector else _INPUTS_MULTIPLE) == 0
        and weight.shape[1] <= _VECTOR_INPUTS
        and x.is_contiguous()
        and weight.is_contiguous()
    )


def _in_registers(rows: int, outputs: int, inputs: int) -> bool:
    few_outputs = outputs <= _FEW_OUTPUTS and inputs <= _FEW_OUTPUTS_INPUTS
    return rows == 1 or (rows <= _VECTOR_ROWS and outputs <= _VECTOR_OUTPUTS) or few_outputs


def skinny_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + bias of supported `x` [M, K] and `weight` [N, K], and `bias` [N]: [M, N] of W's type, summed in
    float32."""
    rows, inputs = x.shape
    outputs = len(weight)
    out = torch.empty((rows, outputs), dtype=weight.dtype, device=x.device)
    if _in_registers(rows, outputs, inputs):
        block_n, block_k, warps = _vector_tile(outputs, inputs, 1, normed=False)
        _vector[(triton.cdiv(outputs, block_n),)](
            x, x, x, weight, x if bias is None else bias, out, x, x, outputs, rows, 0.0, INPUTS=inputs,
            ROWS=triton.next_power_of_2(rows), BLOCK_N=block_n, BLOCK_K=block_k, NORM=False, ROUND_LAST=False,
            ADD=False, KEEP=False, BIAS=bias is not None, GATED=False, num_warps=warps, **dependent_launch(x.device),
        )  # fmt: skip
    else:
        block_n, block_k = _MATRIX_TILE
        _matrix[(triton.cdiv(outputs, block_n),)](
            x, weight, x if bias is None else bias, out, outputs, rows, INPUTS=inputs, ROWS=_TENSOR_CORE_ROWS,
            BLOCK_N=block_n, BLOCK_K=block_k, BIAS=bias is not None, num_warps=2, num_stages=6,
        )  # fmt: skip
    return out


def normed_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    gain: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    normed: torch.Tensor | None = None,
    round_last: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of `x` + `residual` [M, K], times `weight` [N, K], + `bias` [N]; `gated`: SiLU of the first N / 2
    outputs × the rest. `x` and `weight` must be supported. `normed` [M, K], if given, receives the norm.
    `round_last`: see `layers.norm_config`.

    Returns the product, [M, N] or [M, N / 2] of W's type, and the sum, which without a residual is `x` itself.
    """
    rows, inputs = x.shape
    outputs = len(weight) // 2 if gated else len(weight)
    out = torch.empty((rows, outputs), dtype=weight.dtype, device=x.device)
    stream = x if residual is None else torch.empty_like(residual)
    block_n, block_k, warps = _vector_tile(outputs, inputs, 2 if gated else 1, normed=True)
    _vector[(triton.cdiv(outputs, block_n),)](
        x, x if residual is None else residual, gain, weight, x if bias is None else bias, out, stream,
        x if normed is None else normed, outputs, rows, eps, INPUTS=inputs, ROWS=triton.next_power_of_2(rows),
        BLOCK_N=block_n, BLOCK_K=block_k, NORM=True, ROUND_LAST=round_last, ADD=residual is not None,
        KEEP=normed is not None, BIAS=bias is not None, GATED=gated, num_warps=warps, **dependent_launch(x.device),
    )  # fmt: skip
    return out, stream


def _vector_tile(outputs: int, inputs: int, weight_rows: int, *, normed: bool) -> tuple[int, int, int]:
    """Outputs and inputs of a tile, and its warps, where each output has so many rows of W."""
    small = outputs <= _VECTOR_OUTPUTS and not normed
    warps = 8 if inputs >= _LONG_INPUTS else 2 if small and inputs <= _SHORT_INPUTS else 4
    registers = 4 * weight_rows * triton.cdiv(inputs, _WARP_INPUTS * warps)
    block_n = _FEW_OUTPUTS_EACH if small or warps == 8 else 16
    while block_n > 1 and (block_n * registers > _WEIGHT_REGISTERS or outputs < block_n * _PROGRAMS):
        block_n //= 2
    # Warps next to each other along the inputs each sum a part of every output.
    return block_n, _WARP_INPUTS * warps, warps
