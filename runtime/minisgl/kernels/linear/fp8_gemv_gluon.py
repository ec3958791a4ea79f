"""One row times W^T in FP8 on Hopper, with a scale per block of 128 × 128 weights or per output. The row stays in 16
bits; weights become float32 in registers.

Each program holds the row in registers and reads one group of outputs after the other, always the next one while it
multiplies the last; the first before the previous kernel has ended. So the addition to the residual stream and the norm
cost each program little, and are part of the kernel, as is SiLU × up behind the product.
"""

import functools
from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from minisgl.hopper import MULTIPROCESSORS
from minisgl.kernels.launch.dependent_launch_gluon import start_next, wait_for_previous
from minisgl.kernels.launch.dependent_launch_triton import dependent_launch
from minisgl.kernels.linear.fp8_unpack_gluon import four_floats, four_inputs
from minisgl.kernels.pointwise.fp8_rows import BLOCK

_BLOCK = gl.constexpr(BLOCK)
_VECTOR = 8
_MOST_INPUTS = 32_768
_LONG_INPUTS = 8192
"""Inputs above which 8 warps share an output."""
_WEIGHT_REGISTERS = 40
"""Registers of a thread for the tiles of W that it reads ahead."""
_LONG_WEIGHT_REGISTERS = 80
"""The same with long inputs, where a multiprocessor has one program."""
_PROGRAMS = 3 * MULTIPROCESSORS
"""Programs: as many as have enough registers."""
_LONG_PROGRAMS = MULTIPROCESSORS
_REGISTERS = 168


class RowTile(NamedTuple):
    """Work of a program at a time: `outputs` rows of W, of which each lane reads `vector` bytes at a time."""

    outputs: int
    vector: int
    warps: int
    programs: int
    """Most programs."""
    registers: int | None
    """Most registers of a thread."""


@gluon.jit
def _row(row, word, WORDS: gl.constexpr, TILE: gl.constexpr):
    """Load the inputs: four tensors [lanes, words] for each tile."""
    parts = ()
    for begin in gl.static_range(0, WORDS, TILE):
        parts = parts + (four_inputs(row, begin + word, begin + word < WORDS),)
    return parts


@gluon.jit
def _weights(weight, unit, units, output, word, WORDS: gl.constexpr, OUTPUTS: gl.constexpr, TILE: gl.constexpr):
    """Load W of a unit of outputs: tiles [outputs, lanes, words]."""
    tiles = ()
    at = weight.to(gl.pointer_type(gl.int32), bitcast=True) + (unit * OUTPUTS + output) * WORDS + word
    for begin in gl.static_range(0, WORDS, TILE):
        if begin + TILE <= WORDS:
            tiles = tiles + (gl.load(at + begin, unit < units, other=0),)
        else:
            tiles = tiles + (gl.load(at + begin, (unit < units) & (word + begin < WORDS), other=0),)
    return tiles


@gluon.jit
def _scales(scales, unit, units, word, WORDS: gl.constexpr, OUTPUTS: gl.constexpr, TILE: gl.constexpr):
    """Load the scales of a unit of outputs: [lanes] for each tile."""
    found = ()
    at = scales + unit * OUTPUTS // _BLOCK * (WORDS * 4 // _BLOCK)
    for begin in gl.static_range(0, WORDS, TILE):
        place = word + begin
        found = found + (gl.load(at + place * 4 // _BLOCK, (unit < units) & (place < WORDS), other=0.0),)
    return found


@gluon.jit
def _product(tiles, parts, scales, TILES: gl.constexpr, CHANNELS: gl.constexpr):
    """Products of the row with tiles of W: [outputs] in float32."""
    total = 0.0
    for i in gl.static_range(TILES):
        weights = four_floats(tiles[i])
        products = 0.0
        for j in gl.static_range(4):
            products += weights[j] * gl.expand_dims(parts[i][j], 0)
        if CHANNELS:
            total += gl.sum(products, 2)
        else:
            total += gl.sum(products, 2) * gl.expand_dims(scales[i], 0)
    return gl.sum(total, 1)


@gluon.jit(do_not_specialize=["units"])
def _fp8_row(
    x, residual, gain, weight, scales, bias, out, stream, units, eps,
    INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, VECTOR: gl.constexpr, NORM: gl.constexpr, ADD: gl.constexpr,
    BIAS: gl.constexpr, GATED: gl.constexpr, CHANNELS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Each program: units of OUTPUTS outputs. A gated program has the gates of its outputs in the first rows of W, and
    the gated values in the rows behind all gates; scales and bias likewise. A word is four inputs."""
    warps: gl.constexpr = gl.num_warps()
    WORDS: gl.constexpr = INPUTS // 4
    EACH: gl.constexpr = VECTOR // 4
    TILE: gl.constexpr = warps * 32 * EACH
    TILES: gl.constexpr = (WORDS + TILE - 1) // TILE
    layout: gl.constexpr = gl.BlockedLayout([OUTPUTS, 1, EACH], [1, 32, 1], [1, warps, 1], [2, 1, 0])
    # That of a row of x, and those of sums over the words of a lane, and of a product.
    inner: gl.constexpr = gl.SliceLayout(0, layout)
    sums: gl.constexpr = gl.SliceLayout(2, layout)
    results: gl.constexpr = gl.SliceLayout(1, sums)
    dtype: gl.constexpr = out.dtype.element_ty
    output = gl.arange(0, OUTPUTS, results)
    place = gl.expand_dims(gl.expand_dims(output, 1), 2)
    word = gl.expand_dims(gl.arange(0, warps * 32, gl.SliceLayout(1, inner)) * EACH, 1) + gl.expand_dims(
        gl.arange(0, EACH, gl.SliceLayout(0, inner)), 0
    )
    words = gl.expand_dims(word, 0)
    lane = gl.arange(0, warps * 32, gl.SliceLayout(0, sums)) * EACH
    first = gl.program_id(0)
    outputs = units * OUTPUTS
    tiles = _weights(weight, first, units, place, words, WORDS, OUTPUTS, TILE)
    factors = ()
    if not CHANNELS:
        factors = _scales(scales, first, units, lane, WORDS, OUTPUTS, TILE)
    ups = ()
    up_factors = ()
    up_weight = weight + outputs * INPUTS
    up_scales = scales + outputs // _BLOCK * (INPUTS // _BLOCK)
    if GATED:
        ups = _weights(up_weight, first, units, place, words, WORDS, OUTPUTS, TILE)
        if not CHANNELS:
            up_factors = _scales(up_scales, first, units, lane, WORDS, OUTPUTS, TILE)
    gains = ()
    if NORM:
        gains = _row(gain, word, WORDS, TILE)
    start_next(PDL)
    wait_for_previous(PDL)

    parts = _row(x, word, WORDS, TILE)
    if ADD:
        olds = _row(residual, word, WORDS, TILE)
        added = ()
        for i in gl.static_range(TILES):
            four = ()
            for j in gl.static_range(4):
                # Rounded where separate operations would round.
                part = (parts[i][j] + olds[i][j]).to(dtype)
                # To memory other than the old stream's, which other programs may not have read yet.
                at = word + i * TILE
                gl.store(stream + at * 4 + j, part, (at < WORDS) & (first == 0))
                four = four + (part.to(gl.float32),)
            added = added + (four,)
        parts = added
    if NORM:
        squares = 0.0
        for i in gl.static_range(TILES):
            for j in gl.static_range(4):
                squares += parts[i][j] * parts[i][j]
        scale = gl.rsqrt(gl.sum(gl.sum(squares, 1), 0) / INPUTS + eps)
        normed = ()
        for i in gl.static_range(TILES):
            four = ()
            for j in gl.static_range(4):
                value = (parts[i][j] * scale).to(dtype).to(gl.float32) * gains[i][j]
                four = four + (value.to(dtype).to(gl.float32),)
            normed = normed + (four,)
        parts = normed

    for unit in range(first, units, gl.num_programs(0)):
        n = unit * OUTPUTS + output
        following = unit + gl.num_programs(0)
        product = _product(tiles, parts, factors, TILES, CHANNELS)
        tiles = _weights(weight, following, units, place, words, WORDS, OUTPUTS, TILE)
        if CHANNELS:
            product *= gl.load(scales + n)
        else:
            factors = _scales(scales, following, units, lane, WORDS, OUTPUTS, TILE)
        if BIAS:
            product += gl.load(bias + n).to(gl.float32)
        if GATED:
            up = _product(ups, parts, up_factors, TILES, CHANNELS)
            ups = _weights(up_weight, following, units, place, words, WORDS, OUTPUTS, TILE)
            if CHANNELS:
                up *= gl.load(scales + outputs + n)
            else:
                up_factors = _scales(up_scales, following, units, lane, WORDS, OUTPUTS, TILE)
            if BIAS:
                up += gl.load(bias + outputs + n).to(gl.float32)
            gate = product.to(dtype).to(gl.float32)
            active = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32)
            product = active * up.to(dtype).to(gl.float32)
        gl.store(out + n, product.to(dtype))


@functools.cache
def row_tile(outputs: int, inputs: int, *, gated: bool) -> RowTile:
    """Tile of a product with `outputs`, which are half of W's rows if it is gated. Measured with benchmarks/fp8_row.py
    on Qwen3-14B."""
    long = inputs > _LONG_INPUTS
    warps = 8 if long else 4
    registers = _VECTOR // 4 * triton.cdiv(inputs, _VECTOR * 32 * warps) * (2 if gated else 1)
    each = 8
    while each > 1 and (each * registers > (_LONG_WEIGHT_REGISTERS if long else _WEIGHT_REGISTERS) or outputs % each):
        each //= 2
    return RowTile(each, _VECTOR, warps, _LONG_PROGRAMS if long else _PROGRAMS, None if long else _REGISTERS)


def fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the products of this file support `x` [T, K] and FP8 `weight` [N, K]."""
    return (
        x.dim() == 2
        and len(x) == 1
        and x.dtype == torch.bfloat16
        and x.is_contiguous()
        and weight.shape[1] <= _MOST_INPUTS
        and weight.numel() < 1 << 31
    )


def fp8_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tile: RowTile | None = None,
) -> torch.Tensor:
    """x W^T + bias of `x` [1, K], `weight` [N, K] with `scales` [N / 128, K / 128] or [N, 1] in float32, and `bias`
    [N]: [1, N] in x's dtype, summed in float32."""
    return _launch(x, None, None, 0.0, weight, scales, bias, gated=False, tile=tile)[0]


def normed_fp8_row(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    gain: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    tile: RowTile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `fp8_row`, of the RMSNorm of `x` + `residual`; `gated`: SiLU of the first N / 2 outputs × the rest.

    Returns the product and the sum, which without a residual is `x` itself."""
    return _launch(x, residual, gain, eps, weight, scales, bias, gated=gated, tile=tile)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    gain: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    gated: bool,
    tile: RowTile | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, inputs = weight.shape
    outputs = rows // 2 if gated else rows
    tile = tile or row_tile(outputs, inputs, gated=gated)
    assert inputs % BLOCK == 0 and outputs % tile.outputs == 0 and BLOCK % tile.outputs == 0
    assert len(scales) == rows or outputs % BLOCK == 0
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    stream = x if residual is None else torch.empty_like(residual)
    units = outputs // tile.outputs
    _fp8_row[(min(units, tile.programs),)](
        x, x if residual is None else residual, x if gain is None else gain, weight, scales,
        x if bias is None else bias, out, stream, units, eps, INPUTS=inputs, OUTPUTS=tile.outputs, VECTOR=tile.vector,
        NORM=gain is not None, ADD=residual is not None, BIAS=bias is not None, GATED=gated,
        CHANNELS=len(scales) == rows, num_warps=tile.warps, maxnreg=tile.registers, **dependent_launch(x.device),
    )  # fmt: skip
    return out, stream
