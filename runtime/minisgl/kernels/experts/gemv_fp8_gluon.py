"""As `gemv_dense_gluon`, with weights in FP8 and a scale per block of 128 × 128: selection of experts and their
feed-forward for very few tokens in two launches. Tokens stay in 16 bits; weights become float32 in registers."""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from minisgl.kernels.experts.gemv_dense_gluon import MAX_TOKENS, selection_keys
from minisgl.kernels.experts.routing_gluon import MAX_EXPERTS, NO_EXPERT, block_of, expert_of, logit_of
from minisgl.kernels.launch.dependent_launch_gluon import start_next, wait_for_previous
from minisgl.kernels.launch.dependent_launch_triton import dependent_launch
from minisgl.kernels.linear.fp8_unpack_gluon import four_floats, four_inputs
from minisgl.kernels.pointwise.fp8_rows import BLOCK

_BLOCK = gl.constexpr(BLOCK)
_WARPS = 4
_EACH = gl.constexpr(2)
"""Words of a lane in a tile: it reads 8 bytes."""
_TILE = gl.constexpr(64)
"""Words of a tile, which a warp reads at a time."""
_MAX_TILES = 24
"""Most tiles of an output's weights that a warp loads before it multiplies."""
_MAX_HIDDEN = 4096
"""Most inputs: with more, x does not fit into the registers of a lane."""


@gluon.jit
def _tiles(matrix, output, word, WORDS: gl.constexpr):
    """Load rows of W: tiles [outputs, lanes, words]."""
    tiles = ()
    at = matrix.to(gl.pointer_type(gl.int32), bitcast=True) + output * WORDS + word
    for begin in gl.static_range(0, WORDS, _TILE):
        if begin + _TILE <= WORDS:
            tiles = tiles + (gl.load(at + begin),)
        else:
            tiles = tiles + (gl.load(at + begin, word + begin < WORDS, other=0),)
    return tiles


@gluon.jit
def _scales(scales, word, WORDS: gl.constexpr):
    """Load the scales of these inputs in a row of blocks: [lanes] for each tile."""
    found = ()
    for begin in gl.static_range(0, WORDS, _TILE):
        found = found + (gl.load(scales + (word + begin) * 4 // _BLOCK, word + begin < WORDS, other=0.0),)
    return found


@gluon.jit
def _inputs(row, word, WORDS: gl.constexpr):
    """Load a token: four tensors [lanes, words] for each tile."""
    parts = ()
    for begin in gl.static_range(0, WORDS, _TILE):
        parts = parts + (four_inputs(row, word + begin, word + begin < WORDS),)
    return parts


@gluon.jit
def _sums(tile, part):
    """Products of a part of a token with a tile, without scales: [outputs, lanes]."""
    weights = four_floats(tile)
    products = 0.0
    for j in gl.static_range(4):
        products += weights[j] * gl.expand_dims(part[j], 0)
    return gl.sum(products, 2)


@gluon.jit
def _gate_up(
    x, logits, weight, scales, out,
    INPUTS: gl.constexpr, WIDTH: gl.constexpr, EXPERTS: gl.constexpr, BLOCK: gl.constexpr, TOP_K: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Each warp: one output of one pair (a token and one of its experts)."""
    WORDS: gl.constexpr = INPUTS // 4
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 1, _EACH], [1, 32, 1], [warps, 1, 1], [2, 1, 0])
    inner: gl.constexpr = gl.SliceLayout(0, layout)
    sums: gl.constexpr = gl.SliceLayout(2, layout)
    dtype: gl.constexpr = out.dtype.element_ty
    pair = gl.program_id(1)
    token = pair // TOP_K
    begin = gl.program_id(0) * warps
    n = begin + gl.arange(0, warps, gl.SliceLayout(1, sums))
    output = gl.expand_dims(gl.expand_dims(n, 1), 2)
    word = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(1, inner)) * _EACH, 1) + gl.expand_dims(
        gl.arange(0, _EACH, gl.SliceLayout(0, inner)), 0
    )
    words = gl.expand_dims(word, 0)
    lane = gl.arange(0, 32, gl.SliceLayout(0, sums)) * _EACH
    wait_for_previous(PDL)
    # Not earlier: the next kernel reads the logits before it waits.
    start_next(PDL)
    keys = selection_keys(logits, token, EXPERTS, BLOCK)
    for _ in range(pair % TOP_K):
        keys = gl.where(keys == gl.max(keys, 0), NO_EXPERT, keys)
    expert = expert_of(gl.max(keys, 0)).to(gl.int64)
    matrix = weight + expert * (2 * WIDTH * INPUTS)
    gates = _tiles(matrix, output, words, WORDS)
    ups = _tiles(matrix + WIDTH * INPUTS, output, words, WORDS)
    rows = scales + (expert * (2 * WIDTH // _BLOCK) + begin // _BLOCK) * (INPUTS // _BLOCK)
    gate_scales = _scales(rows, lane, WORDS)
    up_scales = _scales(rows + WIDTH // _BLOCK * (INPUTS // _BLOCK), lane, WORDS)
    parts = _inputs(x + token * INPUTS, word, WORDS)
    gate = 0.0
    up = 0.0
    for i in gl.static_range((WORDS + _TILE - 1) // _TILE):
        gate += _sums(gates[i], parts[i]) * gl.expand_dims(gate_scales[i], 0)
        up += _sums(ups[i], parts[i]) * gl.expand_dims(up_scales[i], 0)
    # Rounded where separate operations would round.
    gated = gl.sum(gate, 1).to(dtype).to(gl.float32)
    active = (gated / (1.0 + gl.exp(-gated))).to(dtype).to(gl.float32)
    gl.store(out + pair * WIDTH + n, (active * gl.sum(up, 1).to(dtype).to(gl.float32)).to(dtype))


@gluon.jit
def _down(
    x, logits, weight, scales, out,
    WIDTH: gl.constexpr, HIDDEN: gl.constexpr, EXPERTS: gl.constexpr, BLOCK: gl.constexpr, TOP_K: gl.constexpr,
    RENORMALIZE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Each warp: one output of one token, over all of its experts."""
    WORDS: gl.constexpr = WIDTH // 4
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 1, _EACH], [1, 32, 1], [warps, 1, 1], [2, 1, 0])
    inner: gl.constexpr = gl.SliceLayout(0, layout)
    sums: gl.constexpr = gl.SliceLayout(2, layout)
    dtype: gl.constexpr = out.dtype.element_ty
    token = gl.program_id(1)
    begin = gl.program_id(0) * warps
    n = begin + gl.arange(0, warps, gl.SliceLayout(1, sums))
    output = gl.expand_dims(gl.expand_dims(n, 1), 2)
    word = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(1, inner)) * _EACH, 1) + gl.expand_dims(
        gl.arange(0, _EACH, gl.SliceLayout(0, inner)), 0
    )
    words = gl.expand_dims(word, 0)
    lane = gl.arange(0, 32, gl.SliceLayout(0, sums)) * _EACH
    keys = selection_keys(logits, token, EXPERTS, BLOCK)
    highest = logit_of(gl.max(keys, 0), dtype)
    whole = 0.0
    if not RENORMALIZE:
        whole = gl.sum(gl.where(keys == NO_EXPERT, 0.0, gl.exp(logit_of(keys, dtype) - highest)), 0)
    tiles = ()
    factors = ()
    shares = ()
    for _ in gl.static_range(TOP_K):
        best = gl.max(keys, 0)
        keys = gl.where(keys == best, NO_EXPERT, keys)
        expert = expert_of(best).to(gl.int64)
        tiles = tiles + (_tiles(weight + expert * (HIDDEN * WIDTH), output, words, WORDS),)
        rows = scales + (expert * (HIDDEN // _BLOCK) + begin // _BLOCK) * (WIDTH // _BLOCK)
        factors = factors + (_scales(rows, lane, WORDS),)
        share = gl.exp(logit_of(best, dtype) - highest)
        shares = shares + (share,)
        if RENORMALIZE:
            whole += share
    start_next(PDL)
    wait_for_previous(PDL)
    total = 0.0
    for choice in gl.static_range(TOP_K):
        share = (shares[choice] / whole).to(dtype).to(gl.float32)
        parts = _inputs(x + (token * TOP_K + choice) * WIDTH, word, WORDS)
        for i in gl.static_range((WORDS + _TILE - 1) // _TILE):
            total += _sums(tiles[choice][i], parts[i]) * gl.expand_dims(factors[choice][i] * share, 0)
    gl.store(out + token * HIDDEN + n, gl.sum(total, 1).to(dtype))


def fits(x: torch.Tensor, num_experts: int, top_k: int, width: int) -> bool:
    """Whether `run_fp8_experts_vector` supports these shapes."""
    return (
        x.dtype == torch.bfloat16
        and 0 < len(x) <= MAX_TOKENS
        and x.shape[1] % BLOCK == 0
        and x.shape[1] <= _MAX_HIDDEN
        and width % BLOCK == 0
        and top_k * triton.cdiv(width // 4, _TILE.value) <= _MAX_TILES
        and num_experts <= MAX_EXPERTS
        and x.is_contiguous()
    )


def run_fp8_experts_vector(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scales: torch.Tensor,
    down: torch.Tensor,
    down_scales: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool,
) -> torch.Tensor:
    """Compute `route` and `run_experts` with SiLU for supported shapes; sums are in float32."""
    tokens, hidden = x.shape
    num_experts, width = len(down), down.shape[2]
    experts = {"EXPERTS": num_experts, "BLOCK": block_of(num_experts), "TOP_K": top_k}
    launch = dependent_launch(x.device)
    inner = torch.empty((tokens * top_k, width), dtype=x.dtype, device=x.device)
    _gate_up[(width // _WARPS, tokens * top_k)](
        x, logits, gate_up, gate_up_scales, inner, INPUTS=hidden, WIDTH=width, **experts, num_warps=_WARPS,
        maxnreg=96, **launch,
    )  # fmt: skip
    out = torch.empty_like(x)
    _down[(hidden // _WARPS, tokens)](
        inner, logits, down, down_scales, out, WIDTH=width, HIDDEN=hidden, **experts, RENORMALIZE=renormalize,
        num_warps=_WARPS, maxnreg=128, **launch,
    )  # fmt: skip
    return out
