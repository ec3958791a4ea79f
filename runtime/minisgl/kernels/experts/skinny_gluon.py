"""Feed-forward of the selected experts with weights in INT4, MXFP4 or FP8 blocks, for a few tokens of each expert. A
program reads the weights of some outputs of one expert once for up to 16 of its tokens, of MXFP4 up to 32, straight
into the registers from which the tensor cores take them, as in `int4_gemv_gluon`. Each of its warps has all inputs of
its own outputs.

A pair is a token and one of its experts: pair p is expert choice p % K of token p // K. GROUPS: groups of inputs in 128
of INT4 weights, 1 of MXFP4; 0 for FP8 weights. Only with MXFP4 there are biases and another activation than SiLU, and
zeros behind the last input of a row, up to a multiple of 128.
"""

from typing import Final

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from minisgl.kernels.experts.gate import SILU, Gate
from minisgl.kernels.experts.gemv_gluon import of_outputs
from minisgl.kernels.experts.grouped_gemm_triton import Scales, pairs_of_experts, weighted_sum, width_of
from minisgl.kernels.experts.int4_pairs_triton import pairs_and_rows
from minisgl.kernels.launch.dependent_launch_gluon import start_next, wait_for_previous
from minisgl.kernels.launch.dependent_launch_triton import dependent_launch
from minisgl.kernels.linear.fp8_unpack_gluon import four_bfloat16
from minisgl.kernels.linear.int4_gemv_gluon import unpack_fp4, unpack_words
from minisgl.kernels.linear.int4_packed import INPUTS, OUTPUTS, PIECE, groups_in_piece
from minisgl.kernels.pointwise.fp8_rows import BLOCK

# Functions of this file name no constants: see `int4_gemv_gluon`.
assert (OUTPUTS, INPUTS, PIECE, BLOCK) == (64, 128, 1024, 128)

_WARPS: Final = 4
_INT4_REGISTERS: Final = 128
"""Most registers of a thread: four programs run on a multiprocessor."""
_FP8_REGISTERS: Final = 168
"""For words that have half as many weights: three programs."""
_FP4_REGISTERS: Final = 168
"""For twice as many tokens: three programs."""
_MAX_PAIRS: Final = 24
"""Most pairs per expert: above this, tiles of weights in 16 bits are faster. Measured with benchmarks/experts.py."""
_MAX_FP4_PAIRS: Final = 48
"""The same of MXFP4."""


@gluon.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@gluon.constexpr_function
def _mma_layout(warps):
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, warps, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def _word_layout(warps, groups):
    """Words [groups, warps × 16 outputs, words of a group] as the tensor cores take what is in them. Those of FP8 are
    one group, as they are read: 16 bytes of each thread."""
    blocks = 4 // max(groups, 1)
    registers = [[0, 0, 4 << i] for i in range(_log2(blocks))] + [[0, 8, 0]]
    registers += [[1 << i, 0, 0] for i in range(_log2(max(groups, 1)))]
    lanes = [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    if not groups:
        registers = [[0, 0, 1], [0, 0, 2], [0, 0, 16], [0, 8, 0]]
        lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    of_warps = [[0, 16 << i, 0] for i in range(_log2(warps))]
    shape = [groups, 16 * warps, 16 // groups] if groups else [1, 16 * warps, 32]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], shape)


@gluon.constexpr_function
def _memory_layout(warps):
    """Words of INT4 [warps × 2 × 8 outputs, 128] as they are read: 16 bytes of each thread follow those of the one
    before."""
    return gl.BlockedLayout([2, 4], [1, 32], [warps, 1], [1, 0])


@gluon.constexpr_function
def _rows_layout(warps, groups, rows):
    """Inputs [groups, inputs of a group, rows], of which a thread reads what its weights are multiplied with, 16 bytes
    at once. All warps have them all. For INT4 weights rows are in the order of `in_thread_order`."""
    count = max(groups, 1)
    registers = [[0, 1, 0], [0, 2, 0], [0, 4, 0]]
    registers += [[0, 32 << i, 0] for i in range(_log2(4 // groups))] if groups else [[0, 8, 0], [0, 64, 0]]
    registers += [[0, 0, 8 << i] for i in range(_log2(rows // 8))] + [[1 << i, 0, 0] for i in range(_log2(count))]
    lanes = [[0, 8, 0], [0, 16, 0]] if groups else [[0, 16, 0], [0, 32, 0]]
    lanes += [[0, 0, 1], [0, 0, 2], [0, 0, 4]]
    of_warps = [[0, 0, 0] for _ in range(_log2(warps))]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [count, 128 // count, rows])


@gluon.jit
def in_thread_order(k):
    """Place of input `k`, and input of place `k`. Of 32 inputs, the eight of each of 4 threads follow each other."""
    return k // 32 * 32 + k // 2 % 4 * 8 + k // 8 % 4 * 2 + k % 2


@gluon.jit
def _load_step(words, scales, eights, n, step, STEPS: gl.constexpr, WARPS: gl.constexpr, GROUPS: gl.constexpr):
    """Load 128 inputs of outputs `n`, zeros behind the end. INT4: words [2 × warps, 128], scales [groups, 16 × warps],
    and `eights` numbers the same outputs by eights. FP8: words [1, 16 × warps, 32], scales [1, 16 × warps]."""
    there = step < STEPS
    if GROUPS:
        word = gl.arange(0, 128, layout=gl.SliceLayout(0, _memory_layout(WARPS)))
        at = ((eights // 8 * STEPS + step) * 1024 + eights % 8 * 128)[:, None] + word[None, :]
        group = gl.arange(0, GROUPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, _word_layout(WARPS, GROUPS))))
        of_output = n // 64 * (STEPS * GROUPS * 64) + n % 64
        of_scale = ((step * GROUPS + group) * 64)[:, None] + of_output[None, :]
    else:
        word = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, _word_layout(WARPS, 0))))
        row = gl.expand_dims(gl.expand_dims(n * (STEPS * 32) + step * 32, 0), 2)
        at = row + gl.expand_dims(gl.expand_dims(word, 0), 1)
        of_scale = (n // 128 * STEPS + step)[None, :]
    return (
        gl.load(words + at, there, other=0, cache_modifier=".cg"),
        gl.load(scales + of_scale, there, other=0),
    )


@gluon.jit
def _load_rows(x, row, step, WARPS: gl.constexpr, GROUPS: gl.constexpr, ROWS: gl.constexpr):
    """Load 128 inputs of rows that begin at `row`: [groups, inputs of a group, rows]."""
    COUNT: gl.constexpr = max(GROUPS, 1)
    layout: gl.constexpr = _rows_layout(WARPS, GROUPS, ROWS)
    group = gl.arange(0, COUNT, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    k = gl.arange(0, 128 // COUNT, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    at = (step * 128 + group * (128 // COUNT))[:, None] + k[None, :]
    return gl.load(x + (gl.expand_dims(at, 2) + gl.expand_dims(gl.expand_dims(row, 0), 1)))


@gluon.jit
def _operand(part, WARPS: gl.constexpr, GROUPS: gl.constexpr, ROWS: gl.constexpr):
    """What `_load_rows` has loaded, for the tensor cores: in the order of the weights' inputs."""
    if GROUPS:
        # [.., 32 inputs, thread of 4, bits 3 and 4 of the input, bit 0, rows]
        part = gl.permute(gl.reshape(part, [GROUPS, 4 // GROUPS, 4, 4, 2, ROWS]), [0, 1, 3, 2, 4, 5])
        part = gl.reshape(part, [GROUPS, 128 // GROUPS, ROWS])
    else:
        # [64 inputs, thread of 4, word, half of a word, bit 0, rows]
        part = gl.permute(gl.reshape(part, [2, 4, 4, 2, 2, ROWS]), [0, 2, 3, 1, 4, 5])
        part = gl.reshape(part, [1, 128, ROWS])
    return gl.convert_layout(part, gl.DotOperandLayout(1, _mma_layout(WARPS), 2), assert_trivial=True)


@gluon.jit
def _add_product(
    total, tile, part, WARPS: gl.constexpr, GROUPS: gl.constexpr, ROWS: gl.constexpr, FP4: gl.constexpr
):  # fmt: skip
    """`total` + products of a step, [groups, 16 × warps, rows]."""
    words, factor = tile
    layout: gl.constexpr = _mma_layout(WARPS)
    if GROUPS:
        BLOCKS: gl.constexpr = 4 // GROUPS
        # [8 outputs, output of 8, thread of 4, group, 32 inputs]
        words = gl.permute(gl.reshape(words, [2 * WARPS, 8, 4, GROUPS, BLOCKS]), [3, 0, 1, 4, 2])
        words = gl.reshape(words, [GROUPS, 16 * WARPS, BLOCKS * 4])
        words = gl.convert_layout(words, _word_layout(WARPS, GROUPS), assert_trivial=True)
        if FP4:
            weights = unpack_fp4(words, factor)
        else:
            zero = ((factor & 15) | 0x4300) * 0x10001
            weights = unpack_words(words, gl.expand_dims(zero, 2))
            factor = (factor & -16).to(gl.float32, bitcast=True)
    else:
        e0, e1, e2, e3 = four_bfloat16(words)
        weights = gl.join(gl.join(e0, e1), gl.join(e2, e3))
        # [outputs, 64 inputs, thread of 4, word, bit 0, half of a word]
        weights = gl.permute(gl.reshape(weights, [16 * WARPS, 2, 4, 4, 2, 2]), [0, 1, 3, 5, 2, 4])
        weights = gl.reshape(weights, [1, 16 * WARPS, 128])
    weights = gl.convert_layout(weights, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)
    if FP4:
        total = mma_v2(weights, part, total)
    else:
        none = gl.zeros([max(GROUPS, 1), 16 * WARPS, ROWS], gl.float32, layout=layout)
        factor = gl.convert_layout(factor, gl.SliceLayout(2, layout), assert_trivial=True)
        total += mma_v2(weights, part, none) * gl.expand_dims(factor, 2)
    return total


@gluon.jit
def _multiply(
    x, row, words, scales, eights, n, tiles, stride,
    STEPS: gl.constexpr, WARPS: gl.constexpr, GROUPS: gl.constexpr, ROWS: gl.constexpr, FP4: gl.constexpr,
):  # fmt: skip
    """Products of the rows of x that begin at `row` with two tiles of outputs, [16 × warps, rows] each. The second is
    `stride` outputs behind the first; `tiles` has their first step."""
    first = gl.zeros([max(GROUPS, 1), 16 * WARPS, ROWS], gl.float32, layout=_mma_layout(WARPS))
    second = first
    part = _load_rows(x, row, 0, WARPS, GROUPS, ROWS)
    for step in range(STEPS):
        operand = _operand(part, WARPS, GROUPS, ROWS)
        part = _load_rows(x, row, gl.minimum(step + 1, STEPS - 1), WARPS, GROUPS, ROWS)
        # Not both loads first: there are no registers for three tiles.
        first = _add_product(first, tiles[0], operand, WARPS, GROUPS, ROWS, FP4)
        following = _load_step(words, scales, eights, n, step + 1, STEPS, WARPS, GROUPS)
        second = _add_product(second, tiles[1], operand, WARPS, GROUPS, ROWS, FP4)
        behind = _load_step(words, scales, eights + stride // 8, n + stride, step + 1, STEPS, WARPS, GROUPS)
        tiles = (following, behind)
    return gl.sum(first, 0), gl.sum(second, 0)


@gluon.jit
def _load_first(words, scales, eights, n, stride, STEPS: gl.constexpr, WARPS: gl.constexpr, GROUPS: gl.constexpr):
    """Load the first step of both tiles."""
    return (
        _load_step(words, scales, eights, n, 0, STEPS, WARPS, GROUPS),
        _load_step(words, scales, eights + stride // 8, n + stride, 0, STEPS, WARPS, GROUPS),
    )


@gluon.jit
def _of_expert(words, scales, expert, OUTPUTS: gl.constexpr, STEPS: gl.constexpr, GROUPS: gl.constexpr):
    """Words of four or eight weights, and scales, of an expert."""
    if GROUPS:
        piece = expert.to(gl.int64) * (OUTPUTS // 64 * STEPS)
        words += piece * 1024
        scales += piece * (GROUPS * 64)
    else:
        words = words.to(gl.pointer_type(gl.int32), bitcast=True) + expert.to(gl.int64) * (OUTPUTS * STEPS * 32)
        scales += expert * (OUTPUTS // 128 * STEPS)
    return words, scales


@gluon.jit
def _some_pairs(pairs, first, count, ROWS: gl.constexpr, WARPS: gl.constexpr, GROUPS: gl.constexpr):
    """Pairs of an expert from `first` on; behind the last one it is repeated."""
    layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, _rows_layout(WARPS, GROUPS, ROWS)))
    place = first + gl.arange(0, ROWS, layout=layout)
    return gl.load(pairs + gl.minimum(place, count - 1), cache_modifier=".cg")


@gluon.jit
def _store(out, value, pair, first, count, begin, WIDTH: gl.constexpr, ORDERED: gl.constexpr):
    """Store `value` [outputs, rows] as outputs from `begin` on of these pairs, ORDERED as in `in_thread_order`."""
    rows: gl.constexpr = gl.SliceLayout(0, value.type.layout)
    there = first + gl.arange(0, value.shape[1], layout=rows) < count
    row = gl.convert_layout(pair, rows).to(gl.int64) * WIDTH
    output = begin + gl.arange(0, value.shape[0], layout=gl.SliceLayout(1, value.type.layout))
    if ORDERED:
        output = in_thread_order(output)
    gl.store(out + (output[:, None] + row[None, :]), value.to(out.dtype.element_ty), there[None, :])


@gluon.jit
def _gated(value, dtype: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr):
    """8 of each 16 outputs of [outputs, rows] as gates of the others, by `gate.Gate`. SiLU is rounded where separate
    operations would round."""
    half: gl.constexpr = value.shape[0] // 2
    split = gl.permute(gl.reshape(value, [half // 8, 2, 8, value.shape[1]]), [0, 2, 3, 1])
    gate, up = gl.split(gl.reshape(split, [half, value.shape[1], 2]))
    if LIMIT > 0:
        gate = gl.minimum(gate, LIMIT)
        value = gate / (1.0 + gl.exp(-ALPHA * gate)) * (gl.maximum(gl.minimum(up, LIMIT), -LIMIT) + 1.0)
    else:
        gate = gate.to(dtype).to(gl.float32)
        value = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32) * up.to(dtype).to(gl.float32)
    return value


@gluon.jit
def _gate_up_of(
    x, pairs, first, count, words, scales, bias, eights, n, out, begin,
    INPUTS: gl.constexpr, WIDTH: gl.constexpr, ROW: gl.constexpr, TOP_K: gl.constexpr, GROUPS: gl.constexpr,
    FP4: gl.constexpr, BIAS: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """For ROWS pairs of an expert from `first` on."""
    WARPS: gl.constexpr = gl.num_warps()
    STEPS: gl.constexpr = INPUTS // 128
    STRIDE: gl.constexpr = 8 * WARPS
    tiles = _load_first(words, scales, eights, n, STRIDE, STEPS, WARPS, GROUPS)
    pair = _some_pairs(pairs, first, count, ROWS, WARPS, GROUPS)
    row = pair // TOP_K * INPUTS
    values = _multiply(x, row, words, scales, eights, n, tiles, STRIDE, STEPS, WARPS, GROUPS, ROWS, FP4)
    for t in gl.static_range(2):
        value = values[t]
        at = gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, value.type.layout))
        of_tile = begin + t * STRIDE + at // 16 * 8 + at % 8 + at // 8 % 2 * WIDTH
        value = _gated(of_outputs(bias, value, of_tile, BIAS), out.dtype.element_ty, ALPHA, LIMIT)
        _store(out, value, pair, first, count, begin + t * STRIDE, ROW, GROUPS > 0)
        if ROW > WIDTH and begin + 2 * STRIDE == WIDTH:
            # Inputs of the next product behind the last one.
            layout: gl.constexpr = value.type.layout
            zeros = gl.zeros(value.shape, gl.float32, layout=layout)
            _store(out, zeros, pair, first, count, WIDTH + t * STRIDE, ROW, False)


@gluon.jit(do_not_specialize=["tokens"])
def _gate_up(
    x, pairs_of, counts, words, scales, bias, out, tokens,
    INPUTS: gl.constexpr, WIDTH: gl.constexpr, ROW: gl.constexpr, TOP_K: gl.constexpr, GROUPS: gl.constexpr,
    BIAS: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Each program: two tiles of 8 outputs of each warp, of one expert. A tile has the same outputs of gate and up.
    INPUTS: numbers of a row of x. ROW: those of a row of `out`, of which WIDTH are outputs."""
    WARPS: gl.constexpr = gl.num_warps()
    FP4: gl.constexpr = scales.dtype.element_ty.primitive_bitwidth == 8
    if FP4:
        scales = scales.to(gl.pointer_type(gl.int32), bitcast=True)
    expert = gl.program_id(1)
    begin = gl.program_id(0) * (16 * WARPS)
    half = gl.arange(0, 2 * WARPS, layout=gl.SliceLayout(1, _memory_layout(WARPS)))
    eights = begin // 8 + half // 2 + half % 2 * (WIDTH // 8)
    n = gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(0, gl.SliceLayout(2, _word_layout(WARPS, GROUPS))))
    n = begin + n // 16 * 8 + n % 8 + n // 8 % 2 * WIDTH
    words, scales = _of_expert(words, scales, expert, 2 * WIDTH, INPUTS // 128, GROUPS)
    bias += expert * (2 * WIDTH)
    pairs = pairs_of + expert * tokens
    wait_for_previous(PDL)
    # Not earlier: the next kernel reads the pairs before it waits.
    start_next(PDL)
    count = gl.load(counts + expert)
    begun = 0
    if FP4:
        # More than 16 pairs are multiplied 32 at a time.
        begun = (count + 15) // 32 * 32
        for first in range(0, begun, 32):
            _gate_up_of(
                x, pairs, first, count, words, scales, bias, eights, n, out, begin, INPUTS, WIDTH, ROW, TOP_K, GROUPS,
                FP4, BIAS, ALPHA, LIMIT, 32,
            )  # fmt: skip
    # More than 8 pairs are multiplied 16 at a time.
    end = (count + 7) // 16 * 16
    for first in range(begun, end, 16):
        _gate_up_of(
            x, pairs, first, count, words, scales, bias, eights, n, out, begin, INPUTS, WIDTH, ROW, TOP_K, GROUPS, FP4,
            BIAS, ALPHA, LIMIT, 16,
        )  # fmt: skip
    end = gl.maximum(begun, end)
    if end < count:
        _gate_up_of(
            x, pairs, end, count, words, scales, bias, eights, n, out, begin, INPUTS, WIDTH, ROW, TOP_K, GROUPS, FP4,
            BIAS, ALPHA, LIMIT, 8,
        )  # fmt: skip


@gluon.jit
def _down_of(
    x, pairs, first, count, words, scales, bias, eights, n, out, begin, stride,
    INPUTS: gl.constexpr, HIDDEN: gl.constexpr, GROUPS: gl.constexpr, FP4: gl.constexpr, BIAS: gl.constexpr,
    ROWS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """For ROWS pairs of an expert from `first` on."""
    WARPS: gl.constexpr = gl.num_warps()
    STEPS: gl.constexpr = INPUTS // 128
    tiles = _load_first(words, scales, eights, n, stride, STEPS, WARPS, GROUPS)
    pair = _some_pairs(pairs, first, count, ROWS, WARPS, GROUPS)
    start_next(PDL)
    wait_for_previous(PDL)
    values = _multiply(x, pair * INPUTS, words, scales, eights, n, tiles, stride, STEPS, WARPS, GROUPS, ROWS, FP4)
    for t in gl.static_range(2):
        value = values[t]
        of_tile = begin + t * stride + gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, value.type.layout))
        _store(out, of_outputs(bias, value, of_tile, BIAS), pair, first, count, begin + t * stride, HIDDEN, False)


@gluon.jit(do_not_specialize=["tokens"])
def _down(
    x, pairs_of, counts, words, scales, bias, out, tokens,
    INPUTS: gl.constexpr, HIDDEN: gl.constexpr, GROUPS: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Each program: two tiles of 16 outputs of each warp, of one expert. INPUTS: numbers of a row of x."""
    WARPS: gl.constexpr = gl.num_warps()
    FP4: gl.constexpr = scales.dtype.element_ty.primitive_bitwidth == 8
    if FP4:
        scales = scales.to(gl.pointer_type(gl.int32), bitcast=True)
    expert = gl.program_id(1)
    begin = gl.program_id(0) * (32 * WARPS)
    stride = 16 * WARPS
    if HIDDEN % (32 * WARPS):
        # The last program has one tile, twice.
        stride = gl.where(begin + 16 * WARPS < HIDDEN, 16 * WARPS, 0)
    eights = begin // 8 + gl.arange(0, 2 * WARPS, layout=gl.SliceLayout(1, _memory_layout(WARPS)))
    n = begin + gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(0, gl.SliceLayout(2, _word_layout(WARPS, GROUPS))))
    words, scales = _of_expert(words, scales, expert, HIDDEN, INPUTS // 128, GROUPS)
    bias += expert * HIDDEN
    pairs = pairs_of + expert * tokens
    # The kernel of gate and up began when the pairs were there. The L1 cache may hold those of an earlier layer.
    count = gl.load(counts + expert, cache_modifier=".cg")
    begun = 0
    if FP4:
        begun = (count + 15) // 32 * 32
        for first in range(0, begun, 32):
            _down_of(
                x, pairs, first, count, words, scales, bias, eights, n, out, begin, stride, INPUTS, HIDDEN, GROUPS, FP4,
                BIAS, 32, PDL,
            )  # fmt: skip
    end = (count + 7) // 16 * 16
    for first in range(begun, end, 16):
        _down_of(
            x, pairs, first, count, words, scales, bias, eights, n, out, begin, stride, INPUTS, HIDDEN, GROUPS, FP4,
            BIAS, 16, PDL,
        )  # fmt: skip
    end = gl.maximum(begun, end)
    if end < count:
        _down_of(
            x, pairs, end, count, words, scales, bias, eights, n, out, begin, stride, INPUTS, HIDDEN, GROUPS, FP4,
            BIAS, 8, PDL,
        )  # fmt: skip


def fits(x: torch.Tensor, down: torch.Tensor, top_k: int, *, padded: bool = False) -> bool:
    """Whether `run_experts_rows` supports these shapes. `padded`: the experts are in MXFP4."""
    multiple = OUTPUTS if padded else INPUTS
    return (
        x.dtype == torch.bfloat16
        and down.dtype in (torch.float8_e4m3fn, torch.int32)
        and 0 < len(x) * top_k <= (_MAX_FP4_PAIRS if padded else _MAX_PAIRS) * len(down)
        and x.shape[1] % multiple == 0
        and width_of(down) % INPUTS == 0
        and x.is_contiguous()
    )


def run_experts_rows(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    scales: Scales,
    gate: Gate = SILU,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute `run_experts` for supported shapes; sums are in float32. `weights` and `experts` are contiguous.
    `gate_up` [E, 2 N, hidden] and `down` [E, hidden, N] are in FP8, or words in int32, [E, 2 N / 64, hidden * 8] and
    [E, hidden / 64, N * 8], of MXFP4 with inputs that are padded to multiples of 128. `biases` [E, 2 N] and [E,
    hidden]."""
    (tokens, hidden), top_k, num_experts, row = x.shape, experts.shape[1], len(down), width_of(down)
    width = row
    if down.dtype == torch.int32:
        width = gate_up.shape[1] * OUTPUTS // 2
        registers = _FP4_REGISTERS if scales.is_mxfp4 else _INT4_REGISTERS
        gate_up_groups = 1 if scales.is_mxfp4 else groups_in_piece(gate_up, scales.gate_up)
        down_groups = 1 if scales.is_mxfp4 else groups_in_piece(down, scales.down)
        pairs_of, counts, x = pairs_and_rows(x, experts, num_experts, gate_up.shape[2] * INPUTS // PIECE)
    else:
        registers = _FP8_REGISTERS
        gate_up_groups = down_groups = 0
        pairs_of, counts = pairs_of_experts(experts, num_experts)
    first_bias, second_bias = (x, x) if biases is None else biases
    common = {"num_warps": _WARPS, "maxnreg": registers, "BIAS": biases is not None, **dependent_launch(x.device)}
    inner = torch.empty((tokens * top_k, row), dtype=x.dtype, device=x.device)
    _gate_up[(width // (16 * _WARPS), num_experts)](
        x, pairs_of, counts, gate_up, scales.gate_up, first_bias, inner, tokens, INPUTS=x.shape[1], WIDTH=width,
        ROW=row, TOP_K=top_k, GROUPS=gate_up_groups, ALPHA=gate.alpha, LIMIT=gate.limit, **common,
    )  # fmt: skip
    outer = torch.empty((tokens * top_k, hidden), dtype=x.dtype, device=x.device)
    _down[(triton.cdiv(hidden, 32 * _WARPS), num_experts)](
        inner, pairs_of, counts, down, scales.down, second_bias, outer, tokens, INPUTS=row, HIDDEN=hidden,
        GROUPS=down_groups, **common,
    )  # fmt: skip
    return weighted_sum(outer, weights)
