"""As `gemv_dense_gluon`, with weights of 4 bits: selection of experts and their feed-forward for very few tokens in
two launches, each of which multiplies one token on the tensor cores as `int4_gemv_gluon` does."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from minisgl.kernels.experts.gemv_dense_gluon import MAX_TOKENS, selection_keys
from minisgl.kernels.experts.routing_gluon import MAX_EXPERTS, NO_EXPERT, block_of, expert_of, logit_of
from minisgl.kernels.launch.dependent_launch_gluon import start_next, wait_for_previous
from minisgl.kernels.launch.dependent_launch_triton import dependent_launch
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
from minisgl.kernels.linear.int4_packed import INPUTS, OUTPUTS, WORD, groups_in_piece

_GATE_UP_WARPS = 4
_DOWN_WARPS = 8
_MAX_TURNS = 8
"""Most steps of 128 inputs that a warp loads before it multiplies, in 8 registers of each lane."""


@gluon.jit
def _store(out, value, first, COUNT: gl.constexpr):
    """Store the first of equal columns of `value` [COUNT, rows]."""
    row = gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, value.type.layout))
    output = first + gl.arange(0, COUNT, layout=gl.SliceLayout(1, value.type.layout))
    gl.store(out + output[:, None] + row[None, :], value.to(out.dtype.element_ty), (row == 0)[None, :])


@gluon.jit
def _gate_up(
    x, logits, words, scales, out,
    HIDDEN: gl.constexpr, WIDTH: gl.constexpr, EXPERTS: gl.constexpr, BLOCK: gl.constexpr, TOP_K: gl.constexpr,
    GROUPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Each program: 8 outputs of one pair (a token and one of its experts)."""
    WARPS: gl.constexpr = gl.num_warps()
    STEPS: gl.constexpr = HIDDEN // 128
    TURNS: gl.constexpr = (STEPS + WARPS - 1) // WARPS
    EVEN: gl.constexpr = STEPS == TURNS * WARPS
    tile = gl.program_id(0)
    pair = gl.program_id(1)
    token = pair // TOP_K
    eights = tile + (WIDTH // 8) * gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, memory_layout(WARPS))))
    n = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, word_layout(WARPS, GROUPS))))
    n = tile * 8 + n % 8 + n // 8 * WIDTH
    ring = gl.allocate_shared_memory(
        x.dtype.element_ty, [TURNS, WARPS, 128], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    )
    wait_for_previous(PDL)
    # Not earlier: the next kernel reads the logits before it waits.
    start_next(PDL)
    keys = selection_keys(logits, token, EXPERTS, BLOCK)
    for _ in range(pair % TOP_K):
        keys = gl.where(keys == gl.max(keys, 0), NO_EXPERT, keys)
    piece = expert_of(gl.max(keys, 0)).to(gl.int64) * (2 * WIDTH // 64 * STEPS)
    words += piece * 1024
    scales += piece * (GROUPS * 64)
    tiles = ()
    factors = ()
    for i in gl.static_range(TURNS):
        tiles = tiles + (load_words(words, eights, i * WARPS, STEPS, STEPS, WARPS, EVEN),)
        factors = factors + (load_scales(scales, n, i * WARPS, STEPS, STEPS, WARPS, GROUPS, EVEN),)
    store_row(ring, x + token * HIDDEN, 0, STEPS, TURNS, WARPS)
    total = gl.zeros([GROUPS * WARPS, 16, 8], gl.float32, layout=mma_layout(WARPS))
    for i in gl.static_range(TURNS):
        part = row_of_step(ring.index(i), WARPS, GROUPS, 8)
        total = add_product(total, tiles[i], factors[i], 1.0, part, WARPS, GROUPS, 8)
    value = silu_times_up(gl.sum(total, 0), out.dtype.element_ty)
    _store(out + pair * WIDTH, value, tile * 8, 8)


@gluon.jit
def _of_choice(choice, values):
    """Value of each choice: `values` has one for each of a token's experts."""
    found = gl.full(choice.shape, values[0], values[0].dtype, layout=choice.type.layout)
    for i in gl.static_range(1, len(values)):
        found = gl.where(choice == i, values[i], found)
    return found


@gluon.jit
def _down(
    x, logits, words, scales, out,
    WIDTH: gl.constexpr, HIDDEN: gl.constexpr, EXPERTS: gl.constexpr, BLOCK: gl.constexpr, TOP_K: gl.constexpr,
    RENORMALIZE: gl.constexpr, GROUPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Each program: 16 outputs of one token, over all of its experts, whose inputs follow one another."""
    WARPS: gl.constexpr = gl.num_warps()
    STEPS: gl.constexpr = WIDTH // 128
    ALL: gl.constexpr = TOP_K * STEPS
    TURNS: gl.constexpr = (ALL + WARPS - 1) // WARPS
    layout: gl.constexpr = mma_layout(WARPS)
    of_words: gl.constexpr = memory_layout(WARPS)
    of_batch: gl.constexpr = gl.SliceLayout(2, word_layout(WARPS, GROUPS))
    dtype: gl.constexpr = out.dtype.element_ty
    tile = gl.program_id(0)
    token = gl.program_id(1)
    keys = selection_keys(logits, token, EXPERTS, BLOCK)
    highest = logit_of(gl.max(keys, 0), dtype)
    whole = 0.0
    if not RENORMALIZE:
        whole = gl.sum(gl.where(keys == NO_EXPERT, 0.0, gl.exp(logit_of(keys, dtype) - highest)), 0)
    experts = ()
    shares = ()
    for _ in gl.static_range(TOP_K):
        best = gl.max(keys, 0)
        keys = gl.where(keys == best, NO_EXPERT, keys)
        experts = experts + (expert_of(best),)
        share = gl.exp(logit_of(best, dtype) - highest)
        shares = shares + (share,)
        if RENORMALIZE:
            whole += share

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
    for i in gl.static_range(TURNS):
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
    ring = gl.allocate_shared_memory(
        x.dtype.element_ty, [TURNS, WARPS, 128], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    )
    start_next(PDL)
    wait_for_previous(PDL)
    store_row(ring, x + token * (TOP_K * WIDTH), 0, ALL, TURNS, WARPS)
    total = gl.zeros([GROUPS * WARPS, 16, 8], gl.float32, layout=layout)
    for i in gl.static_range(TURNS):
        share = (parts[i] / whole).to(dtype).to(gl.float32)[:, None]
        part = row_of_step(ring.index(i), WARPS, GROUPS, 8)
        total = add_product(total, tiles[i], factors[i], share, part, WARPS, GROUPS, 8)
    _store(out + token * HIDDEN, gl.sum(total, 0), tile * 16, 16)


def fits(x: torch.Tensor, num_experts: int, top_k: int, width: int) -> bool:
    """Whether `run_int4_experts_vector` supports these shapes."""
    hidden = x.shape[1]
    return (
        x.dtype == torch.bfloat16
        and 0 < len(x) <= MAX_TOKENS
        and hidden % INPUTS == 0
        and hidden <= _MAX_TURNS * _GATE_UP_WARPS * INPUTS
        and width % INPUTS == 0
        and top_k * width <= _MAX_TURNS * _DOWN_WARPS * INPUTS
        and num_experts <= MAX_EXPERTS
        and x.is_contiguous()
    )


def run_int4_experts_vector(
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
    """Compute `route` and `run_experts` with SiLU for supported shapes; sums are in float32. `gate_up`
    [E, 2 N / 64, hidden * 8] and `down` [E, hidden / 64, N * 8] are words in int32."""
    tokens, hidden = x.shape
    num_experts, width = len(down), down.shape[2] * WORD // OUTPUTS
    experts = {"EXPERTS": num_experts, "BLOCK": block_of(num_experts), "TOP_K": top_k}
    launch = dependent_launch(x.device)
    inner = torch.empty((tokens * top_k, width), dtype=x.dtype, device=x.device)
    _gate_up[(width // 8, tokens * top_k)](
        x, logits, gate_up, gate_up_scales, inner, HIDDEN=hidden, WIDTH=width, **experts,
        GROUPS=groups_in_piece(gate_up, gate_up_scales), num_warps=_GATE_UP_WARPS, **launch,
    )  # fmt: skip
    out = torch.empty_like(x)
    _down[(hidden // 16, tokens)](
        inner, logits, down, down_scales, out, WIDTH=width, HIDDEN=hidden, **experts, RENORMALIZE=renormalize,
        GROUPS=groups_in_piece(down, down_scales), num_warps=_DOWN_WARPS, **launch,
    )  # fmt: skip
    return out
