"""Feed-forward of the selected experts on CUDA for a decode step or a short prompt. It reads the experts' weights once:
the programs of an expert multiply them with all of its tokens, padded to the size of a tensor-core product.

A pair is a token and one of its experts: pair p is expert choice p % K of token p // K. Weights in FP8 have a scale per
block of 128 × 128; they become 16 bits in registers, and each product of 128 inputs is scaled in float32. Weights of 4
bits, INT4 or MXFP4, are dequantized to 16 bits, piece by piece of 64 outputs and 128 inputs. Those of MXFP4 have zeros
behind their last input.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minisgl.kernels.experts.gate import SILU, Gate
from minisgl.kernels.launch.dependent_launch_triton import dependent_launch, start_next, wait_for_previous
from minisgl.kernels.linear.dequantize_triton import load_piece
from minisgl.kernels.linear.fp4_dequantize_triton import load_fp4_piece
from minisgl.kernels.linear.fp4_packed import BLOCK as FP4_BLOCK
from minisgl.kernels.linear.int4_packed import INPUTS as INT4_INPUTS
from minisgl.kernels.linear.int4_packed import OUTPUTS as INT4_OUTPUTS
from minisgl.kernels.linear.int4_packed import WORD, groups_in_piece
from minisgl.kernels.pointwise.activation_triton import gelu_tanh_times_up, relu_squared, silu_times_up
from minisgl.kernels.pointwise.fp8_rows import BLOCK as FP8_BLOCK

MAX_TOKENS = 2048
"""Most tokens: above this, torch's grouped product is faster where it has a kernel."""


@triton.jit
def store_pairs(experts, pairs_of, counts, expert, pairs, tokens, BLOCK: tl.constexpr):
    """Store the pairs of an expert in order, and their number, at most one per token."""
    count = 0
    for begin in range(0, pairs, BLOCK):
        pair = begin + tl.arange(0, BLOCK)
        mine = tl.load(experts + pair, pair < pairs, other=-1) == expert
        place = count + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(pairs_of + expert * tokens + place, pair, mine)
        count += tl.sum(mine.to(tl.int32), 0)
    tl.store(counts + expert, count)


@triton.jit(do_not_specialize=["pairs", "tokens"])
def _pairs_of_experts(experts, pairs_of, counts, pairs, tokens, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Each program: one expert."""
    start_next(PDL)
    wait_for_previous(PDL)
    store_pairs(experts, pairs_of, counts, tl.program_id(0), pairs, tokens, BLOCK)


@triton.jit
def _some_pairs(pairs, first, count, ROWS: tl.constexpr):
    """ROWS pairs of an expert from `first` on, and a mask of those that exist."""
    place = first + tl.arange(0, ROWS)
    there = place < count
    return tl.load(pairs + place, there, other=0).to(tl.int64), there


@triton.jit
def _first_piece(expert, block, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr):
    """Number of the first piece of a block of 64 outputs of an expert whose weights have 4 bits."""
    return (expert.to(tl.int64) * (OUTPUTS // 64) + block) * ((INPUTS + 127) // 128)


@triton.jit
def _add_product(total, weight, matrix, part, scales, start, SCALED: tl.constexpr, GROUPS: tl.constexpr):
    """Add to `total` [outputs, rows] the product of weights with `part`, inputs from `start` on. `matrix`: pointers to
    the first weights of the outputs, or with GROUPS the number of their first piece in `weight`. `scales`: those of the
    outputs' block of FP8 weights, or all of weights of 4 bits; those of MXFP4 are bytes."""
    if scales.dtype.element_ty == tl.uint8:
        piece = load_fp4_piece(weight, scales, matrix + start // 128)
        total = tl.dot(piece.to(part.dtype), part, total)
    elif GROUPS:
        piece = load_piece(weight, scales, matrix + start // 128, GROUPS)
        total = tl.dot(piece.to(part.dtype), part, total)
    elif SCALED:
        total += tl.dot(tl.load(matrix + start).to(part.dtype), part) * tl.load(scales + start // SCALED)
    else:
        total = tl.dot(tl.load(matrix + start), part, total)
    return total


@triton.jit
def _inputs(rows, there, k, start, INPUTS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load inputs [BLOCK_K, rows] from `start` on, of rows that are `there`; zeros behind the last one."""
    if INPUTS % BLOCK_K:
        part = tl.load(rows + start, there[None, :] & (start + k < INPUTS)[:, None], other=0.0)
    else:
        part = tl.load(rows + start, there[None, :], other=0.0)
    return part


@triton.jit
def _add_bias(total, bias, n, BIAS: tl.constexpr):
    """`total` [outputs, rows] + the bias of outputs `n`."""
    if BIAS:
        total += tl.load(bias + n).to(tl.float32)[:, None]
    return total


@triton.jit
def activated(gate, up, dtype: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, GELU: tl.constexpr):
    """See `gate.Gate`."""
    if LIMIT > 0:
        gate, up = tl.minimum(gate, LIMIT), tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        value = (gate * tl.sigmoid(gate * ALPHA) * (up + 1.0)).to(dtype)
    elif GELU:
        value = gelu_tanh_times_up(gate, up, dtype)
    else:
        value = silu_times_up(gate, up, dtype)
    return value


@triton.jit(do_not_specialize=["tokens"])
def _gate_up(
    x, pairs_of, counts, weight, scales, bias, out, tokens, INPUTS: tl.constexpr, WIDTH: tl.constexpr,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALED: tl.constexpr,
    GROUPS: tl.constexpr, BIAS: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, GELU: tl.constexpr,
    GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program: BLOCK_N outputs of one expert, for ROWS of its tokens at a time. SCALED: inputs and outputs of FP8
    weights that share a scale; 0 for others. GROUPS: groups of inputs in a piece of weights of 4 bits; 0 for others.
    Without GATED `weight` has WIDTH rows in 16 bits, and there is no bias."""
    PRODUCTS: tl.constexpr = 2 if GATED else 1
    expert = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    gate = weight + expert.to(tl.int64) * (PRODUCTS * WIDTH * INPUTS) + n[:, None] * INPUTS + k[None, :]
    up = gate + WIDTH * INPUTS
    gate_scales = scales
    up_scales = scales
    if SCALED:
        block = expert * (2 * WIDTH // SCALED) + tl.program_id(0) * BLOCK_N // SCALED
        gate_scales += block * (INPUTS // SCALED)
        up_scales = gate_scales + WIDTH // SCALED * (INPUTS // SCALED)
    if GROUPS:
        gate = _first_piece(expert, tl.program_id(0), 2 * WIDTH, INPUTS)
        up = gate + WIDTH // 64 * ((INPUTS + 127) // 128)
    start_next(PDL)
    wait_for_previous(PDL)
    count = tl.load(counts + expert)
    for first in range(0, count, ROWS):
        pair, there = _some_pairs(pairs_of + expert * tokens, first, count, ROWS)
        rows = x + (pair // TOP_K)[None, :] * INPUTS + k[:, None]
        gates = tl.zeros((BLOCK_N, ROWS), tl.float32)
        ups = tl.zeros((BLOCK_N, ROWS), tl.float32)
        for start in range(0, INPUTS, BLOCK_K):
            part = _inputs(rows, there, k, start, INPUTS, BLOCK_K)
            gates = _add_product(gates, weight, gate, part, gate_scales, start, SCALED, GROUPS)
            if GATED:
                ups = _add_product(ups, weight, up, part, up_scales, start, SCALED, GROUPS)
        gates = _add_bias(gates, bias + expert * (2 * WIDTH), n, BIAS)
        ups = _add_bias(ups, bias + expert * (2 * WIDTH) + WIDTH, n, BIAS)
        if GATED:
            value = activated(gates, ups, out.dtype.element_ty, ALPHA, LIMIT, GELU)
        else:
            value = relu_squared(gates, out.dtype.element_ty)
        tl.store(out + pair[None, :] * WIDTH + n[:, None], value, there[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _down(
    x, pairs_of, counts, weight, scales, bias, out, tokens, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALED: tl.constexpr, GROUPS: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program: BLOCK_N outputs of one expert, for ROWS of its pairs at a time."""
    expert = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    matrix = weight + expert.to(tl.int64) * (OUTPUTS * WIDTH) + n[:, None] * WIDTH + k[None, :]
    block_scales = scales
    if SCALED:
        block = expert * (OUTPUTS // SCALED) + tl.program_id(0) * BLOCK_N // SCALED
        block_scales += block * (WIDTH // SCALED)
    if GROUPS:
        matrix = _first_piece(expert, tl.program_id(0), OUTPUTS, WIDTH)
    start_next(PDL)
    wait_for_previous(PDL)
    count = tl.load(counts + expert)
    for first in range(0, count, ROWS):
        pair, there = _some_pairs(pairs_of + expert * tokens, first, count, ROWS)
        rows = x + pair[None, :] * WIDTH + k[:, None]
        total = tl.zeros((BLOCK_N, ROWS), tl.float32)
        for start in range(0, WIDTH, BLOCK_K):
            part = _inputs(rows, there, k, start, WIDTH, BLOCK_K)
            total = _add_product(total, weight, matrix, part, block_scales, start, SCALED, GROUPS)
        total = _add_bias(total, bias + expert * OUTPUTS, n, BIAS)
        tl.store(out + pair[None, :] * OUTPUTS + n[:, None], total.to(out.dtype.element_ty), there[None, :])


@triton.jit
def _weighted_sum(
    chosen, places, shares, experts, bias, out, width,
    TOP_K: tl.constexpr, PLACED: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program: BLOCK columns of one token."""
    start_next(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        at = tl.load(places + pair).to(tl.int64) if PLACED else pair
        share = tl.load(shares + pair).to(tl.float32)
        value = tl.load(chosen + at * width + column, column < width, other=0.0).to(tl.float32)
        if BIAS:
            of_expert = bias + tl.load(experts + pair).to(tl.int64) * width + column
            value += tl.load(of_expert, column < width, other=0.0).to(tl.float32)
        total += share * value
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), column < width)


class Tiles(NamedTuple):
    """Work of a program: `rows` tokens at a time, outputs of the two products, inputs per pipeline stage, and numbers
    of stages and warps."""

    rows: int
    gate_up_outputs: int
    gate_up_inputs: int
    down_outputs: int
    down_inputs: int
    stages: int
    warps: int


def fits(x: torch.Tensor, down: torch.Tensor, *, padded: bool = False) -> bool:
    """Whether `run_experts_cuda` supports these shapes. Only this file has products with quantized experts. `padded`:
    they are in MXFP4."""
    width = width_of(down)
    quantized = down.dtype in (torch.float8_e4m3fn, torch.int32)
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and (0 < len(x) <= MAX_TOKENS or not _torch_has_grouped_product(x))
        and x.shape[1] % (INT4_OUTPUTS if padded else 128) == 0
        and (padded or width % (128 if quantized else 32) == 0)
        and x.is_contiguous()
    )


def width_of(down: torch.Tensor) -> int:
    """Intermediate size of experts of which these are the weights behind the activation."""
    return down.shape[2] * WORD // INT4_OUTPUTS if down.dtype == torch.int32 else down.shape[2]


def _torch_has_grouped_product(x: torch.Tensor) -> bool:
    """Whether torch's grouped product is one kernel; otherwise it waits for the device and multiplies group by
    group."""
    return x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] in (9, 10)


class Scales(NamedTuple):
    """Scales of experts in FP8, in float32, or words with the scales and zero points of experts in INT4, in int32, see
    `int4_packed`, or exponents of experts in MXFP4, bytes, see `fp4_packed`."""

    gate_up: torch.Tensor
    """[E, 2 N / 128, hidden / 128], or [E, 2 N / 64, groups of hidden * 64]."""
    down: torch.Tensor
    """[E, hidden / 128, N / 128], or [E, hidden / 64, groups of N * 64]."""

    @property
    def is_mxfp4(self) -> bool:
        return self.down.dtype == torch.uint8


def run_experts_cuda(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    scales: Scales | None = None,
    gate: Gate = SILU,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute `run_experts` for supported shapes. `weights` and `experts` are contiguous; sums are in float32.
    `scales`: those of experts in FP8, or in INT4 or MXFP4, whose `gate_up` and `down` are the words of `int4_packed`
    or `fp4_packed`, [E, 2 N / 64, hidden * 8] and [E, hidden / 64, N * 8], where hidden and N are padded to multiples
    of 128. `biases` [E, 2 N] and [E, hidden]. Where `gate` has no gate, `gate_up` is [E, N, hidden], in 16 bits."""
    tiles = choose_tiles(experts.numel() / len(down), width_of(down), quantized=scales is not None)
    return weighted_sum(run_chosen(x, experts, gate_up, down, tiles, scales, gate, biases), weights)


def choose_tiles(pairs_per_expert: float, width: int, *, quantized: bool = False) -> Tiles:
    """Tiles by load, measured with benchmarks/experts.py on Qwen3-30B-A3B. An expert rarely has more than twice the
    average number of pairs."""
    inputs = math.gcd(width, 128)
    outputs = min(inputs, 64)
    if quantized:
        # A stage is a block or a piece of 128 inputs.
        rows = 16 if pairs_per_expert <= 8 else 32 if pairs_per_expert <= 16 else 64
        return Tiles(rows, 64, FP8_BLOCK, 64, FP8_BLOCK, 3, 4)
    if pairs_per_expert <= 8:
        return Tiles(16, outputs, 128, 128, inputs, 3, 4)
    if pairs_per_expert <= 32:
        return Tiles(32 if pairs_per_expert <= 16 else 64, outputs, 64, 128, outputs, 4, 4)
    return Tiles(128, outputs, 64, 128, outputs, 3, 4)


def pairs_of_experts(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`experts` [T, K] to the pairs of each expert in order [E, T], of which it has counts [E]; both int32."""
    tokens = len(experts)
    pairs_of = torch.empty((num_experts, tokens), dtype=torch.int32, device=experts.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    _pairs_of_experts[(num_experts,)](
        experts, pairs_of, counts, experts.numel(), tokens, BLOCK=1024, num_warps=4, **dependent_launch(experts.device)
    )
    return pairs_of, counts


def run_chosen(
    x: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    tiles: Tiles,
    scales: Scales | None = None,
    gate: Gate = SILU,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Outputs of the pairs, [T * K, hidden]."""
    assert gate.gated or (scales is None and biases is None)
    # A product is scaled as a whole.
    assert scales is None or (tiles.gate_up_inputs <= FP8_BLOCK and tiles.down_inputs <= FP8_BLOCK)
    tokens, hidden = x.shape
    num_experts, width, top_k = len(down), width_of(down), experts.shape[1]
    scaled = gate_up_groups = down_groups = 0
    if scales is not None and scales.is_mxfp4:
        # Outputs of the first product are padded to 64, inputs of the second to 128.
        width = gate_up.shape[1] * INT4_OUTPUTS // 2
        gate_up_groups = down_groups = INT4_INPUTS // FP4_BLOCK
    elif scales is not None and down.dtype == torch.int32:
        assert tiles.gate_up_outputs == tiles.down_outputs == INT4_OUTPUTS
        assert tiles.gate_up_inputs == tiles.down_inputs == INT4_INPUTS
        gate_up_groups = groups_in_piece(gate_up, scales.gate_up)
        down_groups = groups_in_piece(down, scales.down)
    elif scales is not None:
        scaled = FP8_BLOCK
    pairs_of, counts = pairs_of_experts(experts, num_experts)
    first_bias, second_bias = (x, x) if biases is None else biases
    launch = dependent_launch(x.device)
    inner = torch.empty((tokens * top_k, width), dtype=x.dtype, device=x.device)
    _gate_up[(width // tiles.gate_up_outputs, num_experts)](
        x, pairs_of, counts, gate_up, gate_up if scales is None else scales.gate_up, first_bias, inner, tokens,
        INPUTS=hidden, WIDTH=width, TOP_K=top_k, ROWS=tiles.rows, BLOCK_N=tiles.gate_up_outputs,
        BLOCK_K=tiles.gate_up_inputs, SCALED=scaled, GROUPS=gate_up_groups, BIAS=biases is not None, ALPHA=gate.alpha,
        LIMIT=gate.limit, GELU=gate.gelu, GATED=gate.gated, num_warps=tiles.warps, num_stages=tiles.stages, **launch,
    )  # fmt: skip
    outer = torch.empty((tokens * top_k, hidden), dtype=x.dtype, device=x.device)
    _down[(hidden // tiles.down_outputs, num_experts)](
        inner, pairs_of, counts, down, down if scales is None else scales.down, second_bias, outer, tokens,
        WIDTH=width, OUTPUTS=hidden, ROWS=tiles.rows, BLOCK_N=tiles.down_outputs, BLOCK_K=tiles.down_inputs,
        SCALED=scaled, GROUPS=down_groups, BIAS=biases is not None, num_warps=tiles.warps, num_stages=tiles.stages,
        **launch,
    )  # fmt: skip
    return outer


def weighted_sum(
    chosen: torch.Tensor,
    weights: torch.Tensor,
    places: torch.Tensor | None = None,
    experts: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum of `chosen` [T * K, hidden] times `weights` [T, K] over K in float32: [T, hidden]. `places` [T * K]: row of
    `chosen` of each pair; None: its own. With `bias` [E, hidden] that of each pair's expert, `experts` [T, K], is added
    to its row first. All are contiguous."""
    (tokens, top_k), hidden = weights.shape, chosen.shape[1]
    out = torch.empty((tokens, hidden), dtype=chosen.dtype, device=chosen.device)
    _weighted_sum[(tokens, triton.cdiv(hidden, 1024))](
        chosen, weights if places is None else places, weights, weights if experts is None else experts,
        weights if bias is None else bias, out, hidden, TOP_K=top_k, PLACED=places is not None, BIAS=bias is not None,
        BLOCK=1024, num_warps=4, **dependent_launch(chosen.device),
    )  # fmt: skip
    return out
