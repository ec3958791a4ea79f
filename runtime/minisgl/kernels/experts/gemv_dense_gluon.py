"""Selection of experts and their feed-forward for very few tokens on CUDA, in two launches: each warp selects the
experts itself and multiplies one row of an expert with one token, with all loads in flight at once.

It is written in Gluon, Triton's lower level, because a layout there states which thread holds which values: each lane
loads its own share of x, and warps exchange nothing.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from minisgl.kernels.experts.routing_gluon import MAX_EXPERTS, NO_EXPERT, block_of, expert_keys, expert_of, logit_of
from minisgl.kernels.launch.dependent_launch_gluon import start_next, wait_for_previous
from minisgl.kernels.launch.dependent_launch_triton import dependent_launch

MAX_TOKENS = 3

_WARPS = 4
_TILE = gl.constexpr(256)
"""Inputs that a warp reads at a time: 16 bytes per lane."""
_MAX_TILES = 24
"""Most tiles of an output's weights that a warp loads before it multiplies, in 4 registers of each lane."""
_MAX_HIDDEN = 4096
"""Most inputs: with more, x does not fit into the registers of a lane."""


@gluon.jit
def _tile(matrix, n, k, BEGIN: gl.constexpr, INPUTS: gl.constexpr):
    """Load [outputs, inputs] from input BEGIN on."""
    at = matrix + (n[:, None] * INPUTS + (k + BEGIN)[None, :])
    if BEGIN + k.shape[0] <= INPUTS:
        return gl.load(at)
    else:
        return gl.load(at, (k + BEGIN < INPUTS)[None, :], other=0.0)


@gluon.jit
def _part(row, k, BEGIN: gl.constexpr, INPUTS: gl.constexpr):
    """Load [inputs] of a token from input BEGIN on."""
    if BEGIN + k.shape[0] <= INPUTS:
        return gl.load(row + k + BEGIN)
    else:
        return gl.load(row + k + BEGIN, k + BEGIN < INPUTS, other=0.0)


@gluon.jit
def selection_keys(logits, token, EXPERTS: gl.constexpr, BLOCK: gl.constexpr):
    """Layout in which each warp has all logits of a token, spread over its lanes."""
    layout: gl.constexpr = gl.BlockedLayout([1, BLOCK // 32], [1, 32], [gl.num_warps(), 1], [1, 0])
    expert = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))
    # Bypass the L1 cache, which may hold the logits of an earlier layer.
    logit = gl.load(logits + token * EXPERTS + expert, expert < EXPERTS, other=0.0, cache_modifier=".cg")
    return expert_keys(logit, expert, EXPERTS)


@gluon.jit
def _gate_up(
    x, logits, weight, out,
    INPUTS: gl.constexpr, WIDTH: gl.constexpr, EXPERTS: gl.constexpr, BLOCK: gl.constexpr, TOP_K: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Each warp: one output of one pair (a token and one of its experts)."""
    TILES: gl.constexpr = (INPUTS + _TILE - 1) // _TILE
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [warps, 1], [1, 0])
    dtype: gl.constexpr = out.dtype.element_ty
    pair = gl.program_id(1)
    token = pair // TOP_K
    n = gl.program_id(0) * warps + gl.arange(0, warps, layout=gl.SliceLayout(1, layout))
    k = gl.arange(0, _TILE, layout=gl.SliceLayout(0, layout))
    wait_for_previous(PDL)
    # Not earlier: the next kernel reads the logits before it waits.
    start_next(PDL)
    keys = selection_keys(logits, token, EXPERTS, BLOCK)
    for _ in range(pair % TOP_K):
        keys = gl.where(keys == gl.max(keys, 0), NO_EXPERT, keys)
    matrix = weight + expert_of(gl.max(keys, 0)).to(gl.int64) * (2 * WIDTH * INPUTS)
    row = x + token * INPUTS
    gates = ()
    ups = ()
    parts = ()
    for i in gl.static_range(TILES):
        gates = gates + (_tile(matrix, n, k, i * _TILE, INPUTS),)
        ups = ups + (_tile(matrix + WIDTH * INPUTS, n, k, i * _TILE, INPUTS),)
        parts = parts + (_part(row, k, i * _TILE, INPUTS),)
    gate = gl.zeros([warps, _TILE], gl.float32, layout=layout)
    up = gl.zeros([warps, _TILE], gl.float32, layout=layout)
    for i in gl.static_range(TILES):
        part = parts[i].to(gl.float32)[None, :]
        gate += gates[i].to(gl.float32) * part
        up += ups[i].to(gl.float32) * part
    # Rounded where separate operations would round.
    gated = gl.sum(gate, 1).to(dtype).to(gl.float32)
    active = (gated / (1.0 + gl.exp(-gated))).to(dtype).to(gl.float32)
    gl.store(out + pair * WIDTH + n, (active * gl.sum(up, 1).to(dtype).to(gl.float32)).to(dtype))


@gluon.jit
def _down(
    x, logits, weight, out,
    WIDTH: gl.constexpr, OUTPUTS: gl.constexpr, EXPERTS: gl.constexpr, BLOCK: gl.constexpr, TOP_K: gl.constexpr,
    RENORMALIZE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Each warp: one output of one token, over all of its experts."""
    TILES: gl.constexpr = (WIDTH + _TILE - 1) // _TILE
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [warps, 1], [1, 0])
    dtype: gl.constexpr = out.dtype.element_ty
    token = gl.program_id(1)
    n = gl.program_id(0) * warps + gl.arange(0, warps, layout=gl.SliceLayout(1, layout))
    k = gl.arange(0, _TILE, layout=gl.SliceLayout(0, layout))
    keys = selection_keys(logits, token, EXPERTS, BLOCK)
    highest = logit_of(gl.max(keys, 0), dtype)
    total = 0.0
    if not RENORMALIZE:
        total = gl.sum(gl.where(keys == NO_EXPERT, 0.0, gl.exp(logit_of(keys, dtype) - highest)), 0)
    tiles = ()
    shares = ()
    for _ in gl.static_range(TOP_K):
        best = gl.max(keys, 0)
        keys = gl.where(keys == best, NO_EXPERT, keys)
        matrix = weight + expert_of(best).to(gl.int64) * (OUTPUTS * WIDTH)
        for i in gl.static_range(TILES):
            tiles = tiles + (_tile(matrix, n, k, i * _TILE, WIDTH),)
        share = gl.exp(logit_of(best, dtype) - highest)
        shares = shares + (share,)
        if RENORMALIZE:
            total += share
    start_next(PDL)
    wait_for_previous(PDL)
    sums = gl.zeros([warps, _TILE], gl.float32, layout=layout)
    for choice in gl.static_range(TOP_K):
        share = (shares[choice] / total).to(dtype).to(gl.float32)
        for i in gl.static_range(TILES):
            part = _part(x + (token * TOP_K + choice) * WIDTH, k, i * _TILE, WIDTH).to(gl.float32) * share
            sums += tiles[choice * TILES + i].to(gl.float32) * part[None, :]
    gl.store(out + token * OUTPUTS + n, gl.sum(sums, 1).to(dtype))


def fits(x: torch.Tensor, num_experts: int, top_k: int, width: int) -> bool:
    """Whether `run_experts_vector` supports these shapes."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and 0 < len(x) <= MAX_TOKENS
        and x.shape[1] % 32 == 0
        and x.shape[1] <= _MAX_HIDDEN
        and width % 32 == 0
        and top_k * triton.cdiv(width, _TILE.value) <= _MAX_TILES
        and num_experts <= MAX_EXPERTS
        and x.is_contiguous()
    )


def run_experts_vector(
    x: torch.Tensor, logits: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, top_k: int, *, renormalize: bool
) -> torch.Tensor:
    """Compute `route` and `run_experts` with SiLU for supported shapes; sums are in float32."""
    tokens, hidden = x.shape
    num_experts, width = len(down), down.shape[2]
    experts = {"EXPERTS": num_experts, "BLOCK": block_of(num_experts), "TOP_K": top_k}
    launch = dependent_launch(x.device)
    inner = torch.empty((tokens * top_k, width), dtype=x.dtype, device=x.device)
    _gate_up[(width // _WARPS, tokens * top_k)](
        x, logits, gate_up, inner, INPUTS=hidden, WIDTH=width, **experts, num_warps=_WARPS,
        maxnreg=96 if hidden <= 2048 else None, **launch,
    )  # fmt: skip
    out = torch.empty_like(x)
    _down[(hidden // _WARPS, tokens)](
        inner, logits, down, out, WIDTH=width, OUTPUTS=hidden, **experts, RENORMALIZE=renormalize, num_warps=_WARPS,
        maxnreg=128, **launch,
    )  # fmt: skip
    return out
