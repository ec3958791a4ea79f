"""x W^T with weights of 4 bits for one row. Such a product is one read of W. Each warp reads its weights from memory
straight into the registers from which the tensor cores take them, all before it multiplies and, as they do not change,
while the previous kernel still runs. Weights minus their zero point are exact in bfloat16; the sums of a group are
multiplied with its scale in float32.

The kernel also computes SiLU × up behind the product. A norm before it would be computed by each program; as a kernel
of its own it takes less time.

The tensor cores take 16 outputs at a time, so the warps of a program share the inputs of 16 outputs, and add up their
sums in shared memory. For them it is a batch of products: [warps × groups of a step, 16 outputs, inputs of a group].
"""

from typing import Final, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from minisgl.kernels.launch.dependent_launch_gluon import start_next, wait_for_previous
from minisgl.kernels.launch.dependent_launch_triton import dependent_launch
from minisgl.kernels.linear.int4_packed import INPUTS, OUTPUTS, PIECE, groups_in_piece

# Functions that kernels of another file share name no constants of this module: Triton leaves those out of the names of
# some of the kernels.
assert (OUTPUTS, INPUTS, PIECE) == (64, 128, 1024)


@gluon.constexpr_function
def mma_layout(warps):
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@gluon.constexpr_function
def word_layout(warps, groups):
    """Words [groups × warps, 16 outputs, words of a group] as the tensor cores take what is in them."""
    blocks = 4 // groups
    registers = [[0, 0, 4 << i] for i in range(_log2(blocks))] + [[0, 8, 0]]
    registers += [[warps << i, 0, 0] for i in range(_log2(groups))]
    lanes = [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[1 << i, 0, 0] for i in range(_log2(warps))], [], [groups * warps, 16, 16 // groups]
    )


@gluon.constexpr_function
def memory_layout(warps):
    """Words [warps, 2 × 8 outputs, 128] as they are read: 16 bytes of each thread follow those of the one before."""
    return gl.BlockedLayout([1, 2, 4], [1, 1, 32], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def _row_layout(warps):
    """Inputs [warps, 128] as the tensor cores take them from a row of x, the same for all rows."""
    registers = [[0, 1], [0, 8], [0, 16], [0, 32], [0, 64]]
    lanes = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[1 << i, 0] for i in range(_log2(warps))], [], [warps, 128])


@gluon.jit
def load_words(words, eights, first, end, STEPS: gl.constexpr, WARPS: gl.constexpr, EVEN: gl.constexpr):
    """Load a step of each warp, 128 inputs of 2 × 8 outputs: [warps, 2, 128 words]."""
    layout: gl.constexpr = memory_layout(WARPS)
    step = first + gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    if not EVEN:
        # Behind the end the scales are 0.
        step = gl.minimum(step, end - 1)
    place = (eights // 8 * STEPS * 1024 + eights % 8 * 128)[None, :] + (step * 1024)[:, None]
    word = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    at = gl.expand_dims(place, 2) + gl.expand_dims(gl.expand_dims(word, 0), 1)
    return gl.load(words + at, cache_modifier=".cg")


@gluon.jit
def load_scales(
    scales, n, first, end, STEPS: gl.constexpr, WARPS: gl.constexpr, GROUPS: gl.constexpr, EVEN: gl.constexpr
):  # fmt: skip
    """Load the scales of outputs `n`, for a step of each warp: [groups × warps, 16]."""
    layout: gl.constexpr = gl.SliceLayout(2, word_layout(WARPS, GROUPS))
    batch = gl.arange(0, GROUPS * WARPS, layout=gl.SliceLayout(1, layout))
    step = first + batch % WARPS
    of_output = n // 64 * (STEPS * GROUPS * 64) + n % 64
    at = scales + (((step * GROUPS + batch // WARPS) * 64)[:, None] + of_output[None, :])
    if EVEN:
        return gl.load(at)
    else:
        return gl.load(at, (step < end)[:, None], other=0)


@gluon.jit
def unpack_words(words, zero):
    """Words [groups, outputs, words of a group] as `word_layout` has them, with zero points for them, twice in 32 bits,
    to bfloat16 [groups, outputs, inputs of a group]."""
    # Two numbers at a time: 128 + q has q in the lowest bits of a bfloat16; minus 128 + zero point it is exact.
    numbers = gl.inline_asm_elementwise(
        """
        {
            .reg .b32 w, t;
            lop3.b32 t, $8, 0x000F000F, 0x43004300, 0xEA;
            sub.rn.bf16x2 t, t, $9;
            mov.b32 {$0, $1}, t;
            shr.u32 w, $8, 4;
            lop3.b32 t, w, 0x000F000F, 0x43004300, 0xEA;
            sub.rn.bf16x2 t, t, $9;
            mov.b32 {$2, $3}, t;
            shr.u32 w, $8, 8;
            lop3.b32 t, w, 0x000F000F, 0x43004300, 0xEA;
            sub.rn.bf16x2 t, t, $9;
            mov.b32 {$4, $5}, t;
            shr.u32 w, $8, 12;
            lop3.b32 t, w, 0x000F000F, 0x43004300, 0xEA;
            sub.rn.bf16x2 t, t, $9;
            mov.b32 {$6, $7}, t;
        }
        """,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [words, zero],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )
    return _in_order(numbers, words.shape)


@gluon.jit
def _in_order(numbers, SHAPE: gl.constexpr):
    """Eight numbers of each word [groups, outputs, words of a group] to [groups, outputs, inputs of a group]."""
    e0, e1, e2, e3, e4, e5, e6, e7 = numbers
    pairs = gl.join(gl.join(gl.join(e0, e1), gl.join(e2, e3)), gl.join(gl.join(e4, e5), gl.join(e6, e7)))
    # [.., outputs, 32 inputs, thread of 4, bit 0 of the input, bit 3, bit 4]
    groups: gl.constexpr = SHAPE[0]
    outputs: gl.constexpr = SHAPE[1]
    count: gl.constexpr = SHAPE[2]
    pairs = gl.permute(gl.reshape(pairs, [groups, outputs, count // 4, 4, 2, 2, 2]), [0, 1, 2, 6, 5, 3, 4])
    return gl.reshape(pairs, [groups, outputs, count * 8])


@gluon.jit
def _to_fp4(words, factor):
    """Words of MXFP4 codes, see `fp4_packed`, times `factor`, twice in 32 bits: to bfloat16."""
    return gl.inline_asm_elementwise(
        """
        {
            .reg .b32 w, t;
            and.b32 t, $8, 0x81C081C0;
            mul.rn.bf16x2 t, t, $9;
            mov.b32 {$0, $1}, t;
            shl.b32 t, $8, 3;
            and.b32 t, t, 0x81C081C0;
            mul.rn.bf16x2 t, t, $9;
            mov.b32 {$2, $3}, t;
            shl.b32 t, $8, 6;
            and.b32 t, t, 0x81C081C0;
            mul.rn.bf16x2 t, t, $9;
            mov.b32 {$4, $5}, t;
            shl.b32 t, $8, 1;
            and.b32 t, t, 0x80008000;
            shr.u32 w, $8, 3;
            lop3.b32 t, w, 0x01800180, t, 0xEA;
            shr.u32 w, $8, 7;
            lop3.b32 t, w, 0x00400040, t, 0xEA;
            mul.rn.bf16x2 t, t, $9;
            mov.b32 {$6, $7}, t;
        }
        """,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [words, factor],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def unpack_fp4(words, exponents):
    """Words of MXFP4 [1, outputs, words of 128 inputs] as `word_layout` has them, with the exponents of the four blocks
    of each output [1, outputs], bytes of a word, to bfloat16 [1, outputs, 128 inputs]."""
    at: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, words.type.layout))
    word = gl.arange(0, words.shape[2], layout=at)
    of_word = gl.expand_dims(gl.expand_dims(word // 4 * 8, 0), 1)
    factor = (gl.expand_dims(exponents, 2) >> of_word & 255) * 0x800080
    return _in_order(_to_fp4(words, factor), words.shape)


@gluon.jit
def unpack(words, zero, WARPS: gl.constexpr, GROUPS: gl.constexpr, FP4: gl.constexpr):
    """Words [warps, 2, 128] to bfloat16 [groups × warps, 16, inputs of a group]. `zero`: zero points as
    `unpack_words` takes them, or with FP4 exponents as `unpack_fp4` does."""
    layout: gl.constexpr = word_layout(WARPS, GROUPS)
    BLOCKS: gl.constexpr = 4 // GROUPS
    # [warp, 8 outputs of 16, output of 8, thread of 4, group, 32 inputs]
    words = gl.permute(gl.reshape(words, [WARPS, 2, 8, 4, GROUPS, BLOCKS]), [4, 0, 1, 2, 5, 3])
    words = gl.convert_layout(gl.reshape(words, [GROUPS * WARPS, 16, BLOCKS * 4]), layout, assert_trivial=True)
    pairs = unpack_fp4(words, zero) if FP4 else unpack_words(words, gl.expand_dims(zero, 2))
    return gl.convert_layout(pairs, gl.DotOperandLayout(0, mma_layout(WARPS), 2), assert_trivial=True)


@gluon.jit
def add_product(
    total, words, scale, share, x, WARPS: gl.constexpr, GROUPS: gl.constexpr, ROWS: gl.constexpr,
    FP4: gl.constexpr = False,
):  # fmt: skip
    """`total` + a step's products [groups × warps, 16 outputs, rows] times `share`. FP4: words and scales are those of
    MXFP4, and a step is one group."""
    layout: gl.constexpr = mma_layout(WARPS)
    none = gl.zeros([GROUPS * WARPS, 16, ROWS], gl.float32, layout=layout)
    if FP4:
        weights = unpack(words, scale, WARPS, GROUPS, FP4)
        factor = gl.full(scale.shape, 1.0, gl.float32, layout=scale.type.layout) * share
    else:
        weights = unpack(words, ((scale & 15) | 0x4300) * 0x10001, WARPS, GROUPS, FP4)
        factor = (scale & -16).to(gl.float32, bitcast=True) * share
    factor = gl.convert_layout(factor, gl.SliceLayout(2, layout), assert_trivial=True)
    return total + mma_v2(weights, x, none) * gl.expand_dims(factor, 2)


@gluon.jit
def store_row(ring, x, first, inputs, TURNS: gl.constexpr, WARPS: gl.constexpr):
    """Copy a row of x, its inputs from step `first` on up to `inputs`, to shared memory: [turns, warps, 128]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    k = (first + gl.arange(0, WARPS, layout=gl.SliceLayout(1, layout)))[:, None] * 128
    k = k + gl.arange(0, 128, layout=gl.SliceLayout(0, layout))[None, :]
    for i in gl.static_range(TURNS):
        at = k + i * WARPS * 128
        ring.index(i).store(gl.load(x + at, at < inputs, other=0.0))


@gluon.jit
def row_of_step(x, WARPS: gl.constexpr, GROUPS: gl.constexpr, ROWS: gl.constexpr):
    """Load a step of each warp from shared memory [warps, 128]: [groups × warps, inputs of a group, rows], in which all
    rows are the same."""
    GROUP: gl.constexpr = 128 // GROUPS
    layout: gl.constexpr = gl.DotOperandLayout(1, mma_layout(WARPS), 2)
    part = gl.permute(gl.reshape(x.load(_row_layout(WARPS)), [WARPS, GROUPS, GROUP]), [1, 0, 2])
    part = gl.reshape(part, [GROUPS * WARPS, GROUP])
    part = gl.expand_dims(gl.convert_layout(part, gl.SliceLayout(2, layout), assert_trivial=True), 2)
    shape = gl.zeros([GROUPS * WARPS, GROUP, ROWS], part.dtype, layout=layout)
    part, shape = gl.broadcast(part, shape)
    return part


@gluon.jit
def silu_times_up(value, dtype: gl.constexpr):
    """SiLU of the first 8 outputs times the other 8 of [16, rows], rounded where separate operations would round."""
    gate, up = gl.split(gl.permute(gl.reshape(value, [2, 8, value.shape[1]]), [1, 2, 0]))
    gate = gate.to(dtype).to(gl.float32)
    return (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32) * up.to(dtype).to(gl.float32)


@gluon.jit(do_not_specialize=["outputs"])
def _int4_row(
    x, words, scales, bias, out, outputs,
    INPUTS: gl.constexpr, SPLITS: gl.constexpr, GROUPS: gl.constexpr, AHEAD: gl.constexpr, GATED: gl.constexpr,
    BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Each program: 16 rows of W, and with SPLITS a part of the inputs. A gated program has 8 outputs: 8 of the first
    `outputs` rows of W, whose SiLU is multiplied with the 8 rows that are `outputs` behind them."""
    WARPS: gl.constexpr = gl.num_warps()
    # The tensor cores take 8 rows at a time: all are the same.
    ROWS: gl.constexpr = 8
    STEPS: gl.constexpr = INPUTS // 128
    EACH: gl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    TURNS: gl.constexpr = (EACH + WARPS - 1) // WARPS
    EVEN: gl.constexpr = STEPS == SPLITS * TURNS * WARPS
    layout: gl.constexpr = mma_layout(WARPS)
    words_layout: gl.constexpr = word_layout(WARPS, GROUPS)
    tile = gl.program_id(0)
    split = gl.program_id(1)
    first = split * EACH
    end = gl.minimum(first + EACH, STEPS)
    # 8 outputs of the tensor cores' 16, then the others.
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, memory_layout(WARPS))))
    n = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, words_layout)))
    if GATED:
        half = tile + half * (outputs // 8)
        n = tile * 8 + n % 8 + n // 8 * outputs
    else:
        half = tile * 2 + half
        n = tile * 16 + n
    tiles = ()
    factors = ()
    for i in gl.static_range(min(TURNS, AHEAD)):
        tiles = tiles + (load_words(words, half, first + i * WARPS, end, STEPS, WARPS, EVEN),)
        factors = factors + (load_scales(scales, n, first + i * WARPS, end, STEPS, WARPS, GROUPS, EVEN),)
    start_next(PDL)
    wait_for_previous(PDL)

    ring = gl.allocate_shared_memory(
        x.dtype.element_ty, [TURNS, WARPS, 128], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    )
    store_row(ring, x, first, end * 128, TURNS, WARPS)
    total = gl.zeros([GROUPS * WARPS, 16, ROWS], gl.float32, layout=layout)
    for i in gl.static_range(TURNS):
        part = row_of_step(ring.index(i), WARPS, GROUPS, ROWS)
        total = add_product(total, tiles[i], factors[i], 1.0, part, WARPS, GROUPS, ROWS)
        if i + AHEAD < TURNS:
            tiles = tiles + (load_words(words, half, first + (i + AHEAD) * WARPS, end, STEPS, WARPS, EVEN),)
            factors = factors + (load_scales(scales, n, first + (i + AHEAD) * WARPS, end, STEPS, WARPS, GROUPS, EVEN),)

    value = gl.sum(total, 0)
    if BIAS:
        shift = gl.load(bias + gl.convert_layout(n, gl.SliceLayout(1, gl.SliceLayout(0, layout)), assert_trivial=True))
        value += gl.expand_dims(shift.to(gl.float32), 1)
    dtype: gl.constexpr = out.dtype.element_ty
    if GATED:
        value = silu_times_up(value, dtype)
    OUTPUTS: gl.constexpr = 8 if GATED else 16
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, value.type.layout))
    column = tile * OUTPUTS + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, value.type.layout))
    gl.store(out + (split * outputs + column[:, None] + row[None, :]), value.to(dtype), (row == 0)[None, :])


class RowTile(NamedTuple):
    """Work of a program: 16 outputs, and of the inputs a part that `splits` programs share."""

    splits: int
    warps: int
    ahead: int
    """Steps of each warp that are read before it multiplies."""


_REGISTERS: Final = 128
"""Most registers of a thread: four programs of 4 warps run on a multiprocessor."""


def int4_row(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    tile: RowTile,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
) -> torch.Tensor:
    """x W^T + bias of `x` [1, K] bfloat16, W [N, K] as `words` and `scales` of `int4_packed`, and `bias` [N]: [1, N];
    `gated`: SiLU of the first N / 2 outputs × the rest, [1, N / 2]. With several splits their partial sums, [splits, 1,
    N] in float32, which have no bias and are not gated."""
    rows, inputs = x.shape
    outputs = len(words) * OUTPUTS // (2 if gated else 1)
    assert x.is_contiguous() and rows == 1 and (tile.splits == 1 or (bias is None and not gated))
    shape = (1, outputs) if tile.splits == 1 else (tile.splits, 1, outputs)
    out = torch.empty(shape, dtype=x.dtype if tile.splits == 1 else torch.float32, device=x.device)
    _int4_row[(outputs // (8 if gated else 16), tile.splits)](
        x, words, scales, x if bias is None else bias, out, outputs, INPUTS=inputs, SPLITS=tile.splits,
        GROUPS=groups_in_piece(words, scales), AHEAD=tile.ahead, GATED=gated, BIAS=bias is not None,
        num_warps=tile.warps, maxnreg=_REGISTERS, **dependent_launch(x.device),
    )  # fmt: skip
    return out
