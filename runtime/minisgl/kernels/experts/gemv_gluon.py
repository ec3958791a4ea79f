"""Selection of experts and their feed-forward for very few tokens on CUDA, in two launches, with all loads in flight at
once. Weights are dense, or in FP8 blocks of 128 × 128, or have 4 bits: INT4 or MXFP4. Tokens stay in 16 bits.

Each warp selects the experts itself, or they are given. Dense and FP8 weights become float32 in registers: a warp
multiplies one row of an expert with one token (GEMV), and warps exchange nothing. Weights of 4 bits are multiplied on
the tensor cores, as in `int4_gemv_gluon`, 16 rows of W at a time. Only with these there may be biases. FP8 weights have
SiLU alone.

It is written in Gluon, Triton's lower level, because a layout there states which thread holds which values: each lane
loads its own share of x.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from minisgl.kernels.experts.gate import SILU, Gate
from minisgl.kernels.experts.grouped_gemm_triton import Scales, width_of
from minisgl.kernels.experts.routing_gluon import MAX_EXPERTS, NO_EXPERT, block_of, expert_keys, expert_of, logit_of
from minisgl.kernels.launch.dependent_launch_gluon import start_next, wait_for_previous
from minisgl.kernels.launch.dependent_launch_triton import dependent_launch
from minisgl.kernels.linear.fp8_unpack_gluon import four_floats, four_inputs
from minisgl.kernels.linear.int4_gemv_gluon import (
    add_product,
    load_scales,
    load_words,
    memory_layout,
    mma_layout,
    row_of_step,
    silu_times_up,
    store_row,
    word_layout,
)
from minisgl.kernels.linear.int4_packed import INPUTS, OUTPUTS, groups_in_piece
from minisgl.kernels.pointwise.fp8_rows import BLOCK

MAX_TOKENS = 3

_WARPS = 4
_INT4_DOWN_WARPS = (8, 16)
"""As few as have at most `_MAX_TURNS` turns."""
_BLOCK = gl.constexpr(BLOCK)
_MAX_TILES = 24
"""Most tiles of an output's weights that a warp has loaded and not yet multiplied, in 4 registers of each lane."""
_MAX_TURNS = 8
"""The same of INT4: steps of 128 inputs, in 8 registers of each lane."""
_MAX_HIDDEN = 4096
"""Most inputs: with more, x does not fit into the registers of a lane."""
_TILE_INPUTS = 256
"""Inputs of a tile: 8 of each lane, which are numbers of 16 bits, or two words of four FP8 numbers."""


@gluon.constexpr_function
def _tile_of(fp8):
    return 64 if fp8 else 256


@gluon.jit
def _selection_keys(logits, token, EXPERTS: gl.constexpr, BLOCK: gl.constexpr):
    """Keys of a token's experts in a layout in which each warp has them all, spread over its lanes."""
    layout: gl.constexpr = gl.BlockedLayout([1, BLOCK // 32], [1, 32], [gl.num_warps(), 1], [1, 0])
    expert = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))
    # Bypass the L1 cache, which may hold the logits of an earlier layer.
    logit = gl.load(logits + token * EXPERTS + expert, expert < EXPERTS, other=0.0, cache_modifier=".cg")
    return expert_keys(logit, expert, EXPERTS)


@gluon.jit
def _places(FP8: gl.constexpr):
    """Row of W of each warp [warps], place of each lane's numbers or words in a tile [lanes, numbers], and of their
    scale [lanes]."""
    warps: gl.constexpr = gl.num_warps()
    EACH: gl.constexpr = _tile_of(FP8) // 32
    layout: gl.constexpr = gl.BlockedLayout([1, 1, EACH], [1, 32, 1], [warps, 1, 1], [2, 1, 0])
    inner: gl.constexpr = gl.SliceLayout(0, layout)
    sums: gl.constexpr = gl.SliceLayout(2, layout)
    n = gl.program_id(0) * warps + gl.arange(0, warps, gl.SliceLayout(1, sums))
    lanes = gl.arange(0, 32, gl.SliceLayout(1, inner)) * EACH
    place = gl.expand_dims(lanes, 1) + gl.expand_dims(gl.arange(0, EACH, gl.SliceLayout(0, inner)), 0)
    return n, place, gl.arange(0, 32, gl.SliceLayout(0, sums)) * EACH


@gluon.jit
def _tiles(matrix, n, place, INPUTS: gl.constexpr, FP8: gl.constexpr):
    """Load rows `n` of W: tiles [warps, lanes, numbers or words]."""
    COUNT: gl.constexpr = INPUTS // 4 if FP8 else INPUTS
    TILE: gl.constexpr = _tile_of(FP8)
    if FP8:
        matrix = matrix.to(gl.pointer_type(gl.int32), bitcast=True)
    word = gl.expand_dims(place, 0)
    at = matrix + (gl.expand_dims(gl.expand_dims(n, 1), 2) * COUNT + word)
    tiles = ()
    for begin in gl.static_range(0, COUNT, TILE):
        if begin + TILE <= COUNT:
            tiles = tiles + (gl.load(at + begin),)
        else:
            tiles = tiles + (gl.load(at + begin, word + begin < COUNT, other=0),)
    return tiles


@gluon.jit
def _scales(scales, lane, INPUTS: gl.constexpr, FP8: gl.constexpr):
    """Load the scales of these inputs in a row of blocks: [lanes] for each tile. Dense weights have none."""
    found = ()
    for begin in gl.static_range(0, INPUTS // 4 if FP8 else INPUTS, _tile_of(FP8)):
        if FP8:
            found = found + (gl.load(scales + (lane + begin) * 4 // _BLOCK, lane + begin < INPUTS // 4, other=0.0),)
        else:
            found = found + (1.0,)
    return found


@gluon.jit
def _part(row, place, BEGIN: gl.constexpr, INPUTS: gl.constexpr, FP8: gl.constexpr):
    """Load a token's inputs of a tile: [lanes, numbers], or four tensors [lanes, words]."""
    COUNT: gl.constexpr = INPUTS // 4 if FP8 else INPUTS
    at = place + BEGIN
    if FP8:
        return four_inputs(row, at, at < COUNT)
    elif BEGIN + _tile_of(FP8) <= COUNT:
        return gl.load(row + at)
    else:
        return gl.load(row + at, at < COUNT, other=0.0)


@gluon.jit
def _add_tile(total, tile, part, scale, share, FP8: gl.constexpr):
    """`total` + products of a tile with a part of a token, times `share`: [warps, lanes, numbers], of FP8 [warps,
    lanes]."""
    if FP8:
        weights = four_floats(tile)
        products = 0.0
        for j in gl.static_range(4):
            products += weights[j] * gl.expand_dims(part[j], 0)
        return total + gl.sum(products, 2) * gl.expand_dims(scale * share, 0)
    else:
        return total + tile.to(gl.float32) * gl.expand_dims(part.to(gl.float32) * share, 0)


@gluon.jit
def _over_inputs(total, FP8: gl.constexpr):
    """Sum over the inputs: [warps]."""
    if not FP8:
        total = gl.sum(total, 2)
    return gl.sum(total, 1)


@gluon.jit
def _store_int4(out, value, first, COUNT: gl.constexpr):
    """Store the first of equal columns of `value` [COUNT, rows]."""
    row = gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, value.type.layout))
    output = first + gl.arange(0, COUNT, layout=gl.SliceLayout(1, value.type.layout))
    gl.store(out + output[:, None] + row[None, :], value.to(out.dtype.element_ty), (row == 0)[None, :])


@gluon.jit
def of_outputs(bias, value, n, BIAS: gl.constexpr):
    """`value` [outputs, rows] + the bias of its outputs `n`."""
    if BIAS:
        value += gl.expand_dims(gl.load(bias + n).to(gl.float32), 1)
    return value


@gluon.jit
def _clamped(value, dtype: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr):
    """The first 8 outputs of [16, rows] and the other 8 by `gate.Gate` with a limit."""
    gate, up = gl.split(gl.permute(gl.reshape(value, [2, 8, value.shape[1]]), [1, 2, 0]))
    gate = gl.minimum(gate, LIMIT)
    up = gl.maximum(gl.minimum(up, LIMIT), -LIMIT)
    return gate / (1.0 + gl.exp(-ALPHA * gate)) * (up + 1.0)


@gluon.jit
def _gate_up_int4(
    x, words, scales, bias, expert, eights, n, ring, out,
    HIDDEN: gl.constexpr, WIDTH: gl.constexpr, GROUPS: gl.constexpr, FP4: gl.constexpr, BIAS: gl.constexpr,
    ALPHA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """Eight outputs of an expert: `eights` and `n` number their rows of W."""
    WARPS: gl.constexpr = gl.num_warps()
    STEPS: gl.constexpr = (HIDDEN + 127) // 128
    TURNS: gl.constexpr = (STEPS + WARPS - 1) // WARPS
    EVEN: gl.constexpr = STEPS == TURNS * WARPS
    piece = expert * (2 * WIDTH // 64 * STEPS)
    words += piece * 1024
    scales += piece * (GROUPS * 64)
    tiles = ()
    factors = ()
    for i in gl.static_range(TURNS):
        tiles = tiles + (load_words(words, eights, i * WARPS, STEPS, STEPS, WARPS, EVEN),)
        factors = factors + (load_scales(scales, n, i * WARPS, STEPS, STEPS, WARPS, GROUPS, EVEN),)
    store_row(ring, x, 0, HIDDEN, TURNS, WARPS)
    total = gl.zeros([GROUPS * WARPS, 16, 8], gl.float32, layout=mma_layout(WARPS))
    for i in gl.static_range(TURNS):
        part = row_of_step(ring.index(i), WARPS, GROUPS, 8)
        total = add_product(total, tiles[i], factors[i], 1.0, part, WARPS, GROUPS, 8, FP4)
    first = gl.program_id(0) * 8
    value = gl.sum(total, 0)
    output = gl.arange(0, 16, layout=gl.SliceLayout(1, value.type.layout))
    value = of_outputs(bias + expert * (2 * WIDTH), value, first + output % 8 + output // 8 * WIDTH, BIAS)
    if LIMIT > 0:
        value = _clamped(value, out.dtype.element_ty, ALPHA, LIMIT)
    else:
        value = silu_times_up(value, out.dtype.element_ty)
    _store_int4(out, value, first, 8)


@gluon.jit
def _activated(gate, up, dtype: gl.constexpr, GELU: gl.constexpr):
    """SiLU(gate) * up, or GELU by tanh, rounded where separate operations would round."""
    gate = gate.to(dtype).to(gl.float32)
    if GELU:
        # 1 + tanh(y) is 2 sigmoid(2 y); the factor is 2 (2 / pi)^0.5.
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        inner = gate
    active = (gate / (1.0 + gl.exp(-inner))).to(dtype).to(gl.float32)
    return (active * up.to(dtype).to(gl.float32)).to(dtype)


@gluon.jit
def _relu_squared(up, dtype: gl.constexpr):
    up = gl.maximum(up.to(dtype).to(gl.float32), 0.0)
    return (up * up).to(dtype)


@gluon.jit
def _gate_up(
    x, logits, chosen, weight, scales, bias, out,
    HIDDEN: gl.constexpr, WIDTH: gl.constexpr, EXPERTS: gl.constexpr, BLOCK: gl.constexpr, TOP_K: gl.constexpr,
    CHOSEN: gl.constexpr, GROUPS: gl.constexpr, BIAS: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    GELU: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Each warp: one output of one pair (a token and one of its experts). With weights of 4 bits each program: 8
    outputs. CHOSEN: the experts are given, and `logits` is not read. GROUPS: groups of inputs in 128 of INT4 weights, 1
    of MXFP4, whose scales are bytes; 0 for others. Without GATED a warp computes outputs n and n + WIDTH of 2 WIDTH."""
    WARPS: gl.constexpr = gl.num_warps()
    FP4: gl.constexpr = scales.dtype.element_ty.primitive_bitwidth == 8
    if FP4:
        scales = scales.to(gl.pointer_type(gl.int32), bitcast=True)
    FP8: gl.constexpr = weight.dtype.element_ty.primitive_bitwidth == 8
    TILE: gl.constexpr = _tile_of(FP8)
    dtype: gl.constexpr = out.dtype.element_ty
    pair = gl.program_id(1)
    token = pair // TOP_K
    if GROUPS:
        tile = gl.program_id(0)
        half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, memory_layout(WARPS))))
        eights = tile + (WIDTH // 8) * half
        n = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, word_layout(WARPS, GROUPS))))
        n = tile * 8 + n % 8 + n // 8 * WIDTH
        TURNS: gl.constexpr = ((HIDDEN + 127) // 128 + WARPS - 1) // WARPS
        ring = gl.allocate_shared_memory(
            x.dtype.element_ty, [TURNS, WARPS, 128], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
        )
    else:
        n, place, lane = _places(FP8)
    wait_for_previous(PDL)
    # Not earlier: the next kernel reads the logits before it waits.
    start_next(PDL)
    if CHOSEN:
        expert = gl.load(chosen + pair, cache_modifier=".cg").to(gl.int64)
    else:
        keys = _selection_keys(logits, token, EXPERTS, BLOCK)
        for _ in range(pair % TOP_K):
            keys = gl.where(keys == gl.max(keys, 0), NO_EXPERT, keys)
        expert = expert_of(gl.max(keys, 0)).to(gl.int64)
    row = x + token * HIDDEN
    if GROUPS:
        _gate_up_int4(
            row, weight, scales, bias, expert, eights, n, ring, out + pair * WIDTH, HIDDEN, WIDTH, GROUPS, FP4, BIAS,
            ALPHA, LIMIT,
        )  # fmt: skip
    else:
        matrix = weight + expert * (2 * WIDTH * HIDDEN)
        block = expert * (2 * WIDTH // _BLOCK) + gl.program_id(0) * WARPS // _BLOCK
        gate_row = scales + block * (HIDDEN // _BLOCK)
        gates = _tiles(matrix, n, place, HIDDEN, FP8)
        ups = _tiles(matrix + WIDTH * HIDDEN, n, place, HIDDEN, FP8)
        gate_scales = _scales(gate_row, lane, HIDDEN, FP8)
        up_scales = _scales(gate_row + WIDTH // _BLOCK * (HIDDEN // _BLOCK), lane, HIDDEN, FP8)
        parts = ()
        for i in gl.static_range(len(gates)):
            parts = parts + (_part(row, place, i * TILE, HIDDEN, FP8),)
        gate = 0.0
        up = 0.0
        for i in gl.static_range(len(gates)):
            gate = _add_tile(gate, gates[i], parts[i], gate_scales[i], 1.0, FP8)
            up = _add_tile(up, ups[i], parts[i], up_scales[i], 1.0, FP8)
        gate = _over_inputs(gate, FP8)
        up = _over_inputs(up, FP8)
        if GATED:
            gl.store(out + pair * WIDTH + n, _activated(gate, up, dtype, GELU))
        else:
            gl.store(out + pair * (2 * WIDTH) + n, _relu_squared(gate, dtype))
            gl.store(out + pair * (2 * WIDTH) + WIDTH + n, _relu_squared(up, dtype))


@gluon.jit
def _of_choice(choice, values):
    """Value of each choice: `values` has one for each of a token's experts."""
    found = gl.full(choice.shape, values[0], values[0].dtype, layout=choice.type.layout)
    for i in gl.static_range(1, len(values)):
        found = gl.where(choice == i, values[i], found)
    return found


@gluon.jit
def _store_choices(ring, x, WIDTH: gl.constexpr, TOP_K: gl.constexpr, TURNS: gl.constexpr, WARPS: gl.constexpr):
    """As `store_row`, the inputs of all experts of a token, each from a step on."""
    STEPS: gl.constexpr = (WIDTH + 127) // 128
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, layout))
    of_step = gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    for i in gl.static_range(TURNS):
        step = i * WARPS + warp
        k = (step % STEPS * 128)[:, None] + of_step[None, :]
        there = (step < TOP_K * STEPS)[:, None] & (k < WIDTH)
        ring.index(i).store(gl.load(x + ((step // STEPS * WIDTH)[:, None] + k), there, other=0.0))


@gluon.jit
def _load_choices(
    words, scales, experts, shares,
    WIDTH: gl.constexpr, HIDDEN: gl.constexpr, TOP_K: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Load 16 outputs of INT4 weights of all experts of a token, whose inputs follow one another: words, scales and
    shares for each turn of the warps."""
    WARPS: gl.constexpr = gl.num_warps()
    STEPS: gl.constexpr = (WIDTH + 127) // 128
    ALL: gl.constexpr = TOP_K * STEPS
    of_words: gl.constexpr = memory_layout(WARPS)
    of_batch: gl.constexpr = gl.SliceLayout(2, word_layout(WARPS, GROUPS))
    tile = gl.program_id(0)
    eights = tile * 2 + gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, of_words)))
    word = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, of_words)))
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, of_words)))
    of_eights = (eights // 8 * STEPS * 1024 + eights % 8 * 128)[None, :]
    n = tile * 16 + gl.arange(0, 16, layout=gl.SliceLayout(0, of_batch))
    batch = gl.arange(0, GROUPS * WARPS, layout=gl.SliceLayout(1, of_batch))
    of_output = (n // 64 * (STEPS * GROUPS * 64) + n % 64)[None, :]
    tiles = ()
    factors = ()
    parts = ()
    for i in gl.static_range((ALL + WARPS - 1) // WARPS):
        step = gl.minimum(i * WARPS + warp, ALL - 1)
        piece = _of_choice(step // STEPS, experts) * (HIDDEN // 64 * STEPS) + step % STEPS
        place = (piece.to(gl.int64) * 1024)[:, None] + of_eights
        at = gl.expand_dims(place, 2) + gl.expand_dims(gl.expand_dims(word, 0), 1)
        tiles = tiles + (gl.load(words + at, cache_modifier=".cg"),)
        step = i * WARPS + batch % WARPS
        there = step < ALL
        step = gl.minimum(step, ALL - 1)
        piece = _of_choice(step // STEPS, experts) * (HIDDEN // 64 * STEPS) + step % STEPS
        place = (piece.to(gl.int64) * GROUPS + batch // WARPS) * 64
        # Behind the end the scales are 0.
        factors = factors + (gl.load(scales + (place[:, None] + of_output), there[:, None], other=0),)
        parts = parts + (_of_choice(step // STEPS, shares),)
    return tiles, factors, parts


@gluon.jit
def _tiles_of(
    weight, scales, expert, n, place, lane, WIDTH: gl.constexpr, HIDDEN: gl.constexpr, FP8: gl.constexpr
):  # fmt: skip
    """Load an expert's rows `n` of W, and their scales."""
    expert = expert.to(gl.int64)
    block = expert * (HIDDEN // _BLOCK) + gl.program_id(0) * gl.num_warps() // _BLOCK
    tiles = _tiles(weight + expert * (HIDDEN * WIDTH), n, place, WIDTH, FP8)
    return tiles, _scales(scales + block * (WIDTH // _BLOCK), lane, WIDTH, FP8)


@gluon.jit
def _share_of(share, whole, dtype: gl.constexpr, CHOSEN: gl.constexpr):
    """Weight of an expert, rounded where `route` rounds."""
    return share if CHOSEN else (share / whole).to(dtype).to(gl.float32)


@gluon.jit
def _down(
    x, logits, chosen, weight, scales, bias, out,
    WIDTH: gl.constexpr, HIDDEN: gl.constexpr, EXPERTS: gl.constexpr, BLOCK: gl.constexpr, TOP_K: gl.constexpr,
    AHEAD: gl.constexpr, CHOSEN: gl.constexpr, RENORMALIZE: gl.constexpr, GROUPS: gl.constexpr, BIAS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Each warp: one output of one token, over all of its experts. With weights of 4 bits each program: 16 outputs.
    CHOSEN: the experts are given, and `logits` has their weights. AHEAD: experts whose weights are loaded before the
    first product; those of 4 bits are all loaded then."""
    WARPS: gl.constexpr = gl.num_warps()
    FP4: gl.constexpr = scales.dtype.element_ty.primitive_bitwidth == 8
    if FP4:
        scales = scales.to(gl.pointer_type(gl.int32), bitcast=True)
    FP8: gl.constexpr = weight.dtype.element_ty.primitive_bitwidth == 8
    TILE: gl.constexpr = _tile_of(FP8)
    dtype: gl.constexpr = out.dtype.element_ty
    token = gl.program_id(1)
    if not GROUPS:
        n, place, lane = _places(FP8)
    whole = 0.0
    if not CHOSEN:
        keys = _selection_keys(logits, token, EXPERTS, BLOCK)
        highest = logit_of(gl.max(keys, 0), dtype)
        if not RENORMALIZE:
            whole = gl.sum(gl.where(keys == NO_EXPERT, 0.0, gl.exp(logit_of(keys, dtype) - highest)), 0)
    experts = ()
    tiles = ()
    factors = ()
    shares = ()
    for choice in gl.static_range(TOP_K):
        # The kernel of gate and up began when these were there.
        if CHOSEN:
            expert = gl.load(chosen + token * TOP_K + choice, cache_modifier=".cg").to(gl.int32)
            share = gl.load(logits + token * TOP_K + choice, cache_modifier=".cg").to(gl.float32)
        else:
            best = gl.max(keys, 0)
            keys = gl.where(keys == best, NO_EXPERT, keys)
            expert = expert_of(best)
            share = gl.exp(logit_of(best, dtype) - highest)
            if RENORMALIZE:
                whole += share
        experts = experts + (expert,)
        shares = shares + (share,)
        if not GROUPS and choice < AHEAD:
            tile, factor = _tiles_of(weight, scales, expert, n, place, lane, WIDTH, HIDDEN, FP8)
            tiles = tiles + (tile,)
            factors = factors + (factor,)
    if GROUPS:
        TURNS: gl.constexpr = (TOP_K * ((WIDTH + 127) // 128) + WARPS - 1) // WARPS
        tiles, factors, parts = _load_choices(weight, scales, experts, shares, WIDTH, HIDDEN, TOP_K, GROUPS)
        ring = gl.allocate_shared_memory(
            x.dtype.element_ty, [TURNS, WARPS, 128], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
        )
    start_next(PDL)
    wait_for_previous(PDL)
    if GROUPS:
        _store_choices(ring, x + token * (TOP_K * WIDTH), WIDTH, TOP_K, TURNS, WARPS)
        total = gl.zeros([GROUPS * WARPS, 16, 8], gl.float32, layout=mma_layout(WARPS))
        for i in gl.static_range(TURNS):
            share = _share_of(parts[i], whole, dtype, CHOSEN)[:, None]
            part = row_of_step(ring.index(i), WARPS, GROUPS, 8)
            total = add_product(total, tiles[i], factors[i], share, part, WARPS, GROUPS, 8, FP4)
        value = gl.sum(total, 0)
        if BIAS:
            output = gl.program_id(0) * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, value.type.layout))
            for choice in gl.static_range(TOP_K):
                share = _share_of(shares[choice], whole, dtype, CHOSEN)
                of_expert = gl.load(bias + (experts[choice] * HIDDEN + output)).to(gl.float32)
                value += gl.expand_dims(of_expert * share, 1)
        _store_int4(out + token * HIDDEN, value, gl.program_id(0) * 16, 16)
    else:
        total = 0.0
        for choice in gl.static_range(TOP_K):
            share = _share_of(shares[choice], whole, dtype, CHOSEN)
            row = x + (token * TOP_K + choice) * WIDTH
            for i in gl.static_range(len(tiles[choice])):
                part = _part(row, place, i * TILE, WIDTH, FP8)
                total = _add_tile(total, tiles[choice][i], part, factors[choice][i], share, FP8)
            if choice + AHEAD < TOP_K:
                tile, factor = _tiles_of(
                    weight, scales, experts[choice + AHEAD], n, place, lane, WIDTH, HIDDEN, FP8
                )  # fmt: skip
                tiles = tiles + (tile,)
                factors = factors + (factor,)
        gl.store(out + token * HIDDEN + n, _over_inputs(total, FP8).to(dtype))


def fits(x: torch.Tensor, down: torch.Tensor, top_k: int, *, padded: bool = False) -> bool:
    """Whether `run_experts_gemv` supports these shapes. `down` [E, hidden, N] is dense or in FP8, or [E, hidden / 64,
    N * 8] words of INT4 or, if they are `padded`, of MXFP4."""
    hidden, width = x.shape[1], width_of(down)
    if down.dtype == torch.int32:
        enough = triton.cdiv(hidden, _WARPS * INPUTS) <= _MAX_TURNS and _down_warps(top_k * width, padded) is not None
    else:
        enough = hidden <= _MAX_HIDDEN and triton.cdiv(width, _TILE_INPUTS) <= _MAX_TILES
    dense = down.dtype == x.dtype
    multiple = 32 if dense else OUTPUTS if padded else BLOCK
    return (
        (x.dtype == torch.bfloat16 or (dense and x.dtype == torch.float16))
        and 0 < len(x) <= MAX_TOKENS
        and hidden % multiple == 0
        and width % multiple == 0
        and enough
        and len(down) <= MAX_EXPERTS
        and x.is_contiguous()
    )


def supports(down: torch.Tensor, gate: Gate, biases: tuple[torch.Tensor, torch.Tensor] | None) -> bool:
    """Whether experts with weights of this type may have this gate and `biases`."""
    if down.dtype == torch.int32:
        return gate.gated and not gate.gelu
    return biases is None and (gate == SILU if down.dtype == torch.float8_e4m3fn else gate.limit == 0)


def _down_warps(inputs: int, padded: bool) -> int | None:
    """Warps that share these inputs of all experts of a token; None: they are too many."""
    counts = _INT4_DOWN_WARPS if padded else _INT4_DOWN_WARPS[:1]
    return next((warps for warps in counts if triton.cdiv(inputs, warps * INPUTS) <= _MAX_TURNS), None)


def run_experts_gemv(
    x: torch.Tensor,
    scores: torch.Tensor,
    experts: torch.Tensor | None,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
    scales: Scales | None = None,
    gate: Gate = SILU,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    renormalize: bool = False,
) -> torch.Tensor:
    """Compute `run_experts` for supported shapes; sums are in float32. `experts` [T, K], contiguous, and `scores` their
    weights [T, K]; without `experts` also `route`, where `scores` are logits [T, E] in 16 bits. `gate_up`, `down`,
    `scales` and `biases` as in `grouped_gemm_triton.run_experts_cuda`."""
    (tokens, hidden), num_experts, width = x.shape, len(down), width_of(down)
    assert supports(down, gate, biases)
    gate_up_groups = down_groups = 0
    gate_up_outputs = down_outputs = down_warps = _WARPS
    gate_up_registers: int | None = 96 if hidden <= 2048 or scales is not None else 128 if hidden <= 3072 else None
    down_registers: int | None = 128
    if scales is not None and down.dtype == torch.int32:
        gate_up_outputs, down_outputs, gate_up_registers, down_registers = 8, 16, None, None
        down_warps = _down_warps(top_k * width, scales.is_mxfp4) or 0
        if scales.is_mxfp4:
            # As one group: exponents are applied to the weights.
            gate_up_groups = down_groups = 1
            width = gate_up.shape[1] * OUTPUTS // 2
        else:
            gate_up_groups, down_groups = groups_in_piece(gate_up, scales.gate_up), groups_in_piece(down, scales.down)
    sizes = {"HIDDEN": hidden, "EXPERTS": num_experts, "BLOCK": block_of(num_experts), "TOP_K": top_k}
    sizes |= {"CHOSEN": experts is not None, "BIAS": biases is not None}
    chosen = scores if experts is None else experts
    first_bias, second_bias = (x, x) if biases is None else biases
    launch = dependent_launch(x.device)
    inner = torch.empty((tokens * top_k, width), dtype=x.dtype, device=x.device)
    # Without gates a warp has two rows of W, too.
    rows = width if gate.gated else width // 2
    _gate_up[(rows // gate_up_outputs, tokens * top_k)](
        x, scores, chosen, gate_up, gate_up if scales is None else scales.gate_up, first_bias, inner, **sizes,
        WIDTH=rows, GROUPS=gate_up_groups, ALPHA=gate.alpha, LIMIT=gate.limit, GELU=gate.gelu, GATED=gate.gated,
        num_warps=_WARPS, maxnreg=gate_up_registers, **launch,
    )  # fmt: skip
    out = torch.empty_like(x)
    _down[(hidden // down_outputs, tokens)](
        inner, scores, chosen, down, down if scales is None else scales.down, second_bias, out, **sizes, WIDTH=width,
        AHEAD=min(_MAX_TILES // triton.cdiv(width, _TILE_INPUTS), top_k), RENORMALIZE=renormalize, GROUPS=down_groups,
        num_warps=down_warps, maxnreg=down_registers, **launch,
    )  # fmt: skip
    return out
