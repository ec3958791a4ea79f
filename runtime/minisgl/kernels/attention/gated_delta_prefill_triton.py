"""The gated delta rule for prompts on CUDA, in chunks of up to 64 tokens (sections 3.2 and 3.3 of arXiv:2412.06464).

The corrections of a chunk's tokens depend on each other as a triangular system of equations, whose solution does not
depend on the state. So two kernels solve it for all chunks at once, and a third one, which goes from chunk to chunk,
has only matrix products left. Products take operands in the type of the inputs; states, sums and gates are in float32.
"""

import torch
import triton
import triton.language as tl

from minisgl.kernels.attention.gates_triton import delta_gates, saturated, since
from minisgl.kernels.attention.prompt_chunks import CHUNK, PromptChunks

_VALUES = 64
"""Values of a head that a program of the last kernel computes. Fewer would read keys and queries more often."""


@triton.jit
def _inverse(below, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Inverse of I + `below` [CHUNK, CHUNK], which has entries below its diagonal only.

    The inverse of two blocks on the diagonal gives that of the block which they form with the one below them. A power
    series would lose all digits where the keys of a chunk are alike. With inputs of 16 bits the result is rounded to
    these, so TF32 is enough for its products."""
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, below, 0.0)
    for level in range(1, 6):
        joins = (row >> level + 1 == column >> level + 1) & (row >> level != column >> level)
        right = tl.dot(tl.where(joins, below, 0.0), inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, right, input_precision=PRECISION)
    return inverse


@triton.jit
def _gates(decay, step, log_decay, decay_bias, row, inside, head, decay_stride, step_stride):
    """Decay of a chunk's tokens, a logarithm, and their step."""
    raw_decay = tl.load(decay + row * decay_stride + head, inside, other=0.0)
    raw_step = tl.load(step + row * step_stride + head, inside, other=0.0)
    forget, strength = delta_gates(raw_decay, raw_step, tl.load(log_decay + head), tl.load(decay_bias + head))
    return tl.where(inside, forget, 0.0), strength


@triton.jit
def _unit(place, mask, EPS: tl.constexpr):
    """Keys or queries of length 1 in float32."""
    wide = tl.load(place, mask, other=0.0).to(tl.float32)
    return wide * tl.rsqrt(tl.sum(wide * wide, 1) + EPS)[:, None]


# Steps differ in the number of chunks, and gates behind rows that decode in their alignment: one kernel for all.
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["chunks", "decay", "step"])
def _invert_chunks(
    mixed, decay, step, log_decay, decay_bias, chunks, solved_out, count, decay_stride, step_stride,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, EPS: tl.constexpr,
    KEYS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(chunks + count + chunk)
    if length > 0:
        dtype = mixed.dtype.element_ty
        token, keys = tl.arange(0, CHUNK), tl.arange(0, KEYS)
        inside = token < length
        row = (tl.load(chunks + chunk) + token).to(tl.int64)
        own = mixed + row * (2 * KEY_HEADS * KEY + HEADS * VALUE) + (KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY
        k = _unit(own[:, None] + keys[None, :], inside[:, None] & (keys < KEY)[None, :], EPS).to(dtype)
        forget, strength = _gates(decay, step, log_decay, decay_bias, row, inside, head, decay_stride, step_stride)
        kept = since(tl.cumsum(forget, 0), token)
        below = tl.dot(k, tl.trans(k), input_precision=PRECISION) * kept * strength[:, None]
        solved = _inverse(tl.where(token[:, None] > token[None, :], below, 0.0), CHUNK, PRECISION)
        place = (row * HEADS + head)[:, None] * CHUNK + token[None, :]
        tl.store(solved_out + place, solved.to(dtype), inside[:, None])


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["chunks", "decay", "step"])
def _solve_chunks(
    mixed, decay, step, log_decay, decay_bias, chunks, solved_in, keys_out, values_out, queries_out, left_out,
    scores_out, totals_out, count, decay_stride, step_stride,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, EPS: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(chunks + count + chunk)
    if length > 0:
        dtype = mixed.dtype.element_ty
        token, keys, values = tl.arange(0, CHUNK), tl.arange(0, KEYS), tl.arange(0, VALUES)
        inside = token < length
        row = (tl.load(chunks + chunk) + token).to(tl.int64)
        forget, strength = _gates(decay, step, log_decay, decay_bias, row, inside, head, decay_stride, step_stride)
        total, end = tl.cumsum(forget, 0), tl.sum(forget, 0)
        place = (row * HEADS + head)[:, None]
        own = (mixed + row * (2 * KEY_HEADS * KEY + HEADS * VALUE))[:, None]
        of_key = own + (head // (HEADS // KEY_HEADS)) * KEY + keys[None, :]
        key_mask = inside[:, None] & (keys < KEY)[None, :]
        of_head = place * KEY + keys[None, :]
        solved = tl.load(solved_in + place * CHUNK + token[None, :], inside[:, None], other=0.0)
        k = _unit(of_key + KEY_HEADS * KEY, key_mask, EPS)
        known = tl.dot(solved, (k * (strength * tl.exp(total))[:, None]).to(dtype), input_precision=PRECISION)
        tl.store(keys_out + of_head, known.to(dtype), key_mask)
        tl.store(left_out + of_head, (k * tl.exp(end - total)[:, None]).to(dtype), key_mask)
        q = _unit(of_key, key_mask, EPS) * KEY**-0.5
        tl.store(queries_out + of_head, (q * tl.exp(total)[:, None]).to(dtype), key_mask)
        scores = tl.dot(q.to(dtype), tl.trans(k.to(dtype)), input_precision=PRECISION) * since(total, token)
        tl.store(scores_out + place * CHUNK + token[None, :], scores.to(dtype), inside[:, None])
        value_mask = inside[:, None] & (values < VALUE)[None, :]
        of_value = own + 2 * KEY_HEADS * KEY + head * VALUE + values[None, :]
        v = tl.load(of_value, value_mask, other=0.0).to(tl.float32) * strength[:, None]
        solution = tl.dot(solved, v.to(dtype), input_precision=PRECISION)
        tl.store(values_out + place * VALUE + values[None, :], solution.to(dtype), value_mask)
        tl.store(totals_out + chunk * HEADS + head, tl.exp(end))


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["chunks", "ends", "slots"])
def _scan_chunks(
    keys_in, values_in, queries_in, left_in, scores_in, totals_in, chunks, ends, slots, states, checkpoints, out,
    count, place_stride, checkpoint_stride,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    segment, head = tl.program_id(2), tl.program_id(1)
    first, last = tl.load(ends + segment), tl.load(ends + segment + 1)
    if first < last:
        dtype = keys_in.dtype.element_ty
        keys = tl.arange(0, KEYS)
        values = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
        token = tl.arange(0, CHUNK)
        mask = (keys < KEY)[:, None] & (values < VALUE)[None, :]
        matrix = head * KEY * VALUE + keys[:, None] * VALUE + values[None, :]
        own = states + matrix + tl.load(slots + segment).to(tl.int64) * place_stride
        state = tl.load(own, mask, other=0.0)
        for chunk in range(first, last):
            inside = token < tl.load(chunks + count + chunk)
            saved = tl.load(chunks + 4 * count + chunk)
            place = (tl.load(chunks + chunk) + token).to(tl.int64) * HEADS + head
            key_mask = inside[:, None] & (keys < KEY)[None, :]
            value_mask = inside[:, None] & (values < VALUE)[None, :]
            of_head = place[:, None] * KEY + keys[None, :]
            of_value = place[:, None] * VALUE + values[None, :]
            narrow = state.to(dtype)
            known = tl.dot(tl.load(keys_in + of_head, key_mask, other=0.0), narrow, input_precision=PRECISION)
            solution = tl.load(values_in + of_value, value_mask, other=0.0).to(tl.float32)
            change = (solution - known).to(dtype)
            scores = tl.load(scores_in + place[:, None] * CHUNK + token[None, :], inside[:, None], other=0.0)
            read = tl.dot(tl.load(queries_in + of_head, key_mask, other=0.0), narrow, input_precision=PRECISION)
            read = tl.dot(scores, change, read, input_precision=PRECISION)
            tl.store(out + of_value, read.to(out.dtype.element_ty), value_mask)
            left = tl.trans(tl.load(left_in + of_head, key_mask, other=0.0))
            state *= tl.load(totals_in + chunk * HEADS + head)
            state = tl.dot(left, change, state, input_precision=PRECISION)
            if saved >= 0:
                copy = checkpoints + matrix + saved.to(tl.int64) * checkpoint_stride
                tl.store(copy, saturated(state, checkpoints.dtype.element_ty), mask)
        tl.store(own, state, mask)


def gated_delta_prompts_cuda(
    mixed: torch.Tensor,
    decay: torch.Tensor,
    step: torch.Tensor,
    log_decay: torch.Tensor,
    decay_bias: torch.Tensor,
    states: torch.Tensor,
    checkpoints: torch.Tensor,
    slots: torch.Tensor,
    prompts: PromptChunks,
    key_heads: int,
    eps: float,
) -> torch.Tensor:
    """Outputs [T, heads, value_dim] of the tokens of prompts, whose states at `slots` [P] change; as
    `gated_delta_rows_cuda` otherwise. `checkpoints` [count, heads, key_dim, value_dim] of any type."""
    tokens, (heads, key, value) = prompts.num_tokens, states.shape[1:]
    chunks, count = prompts.chunks, prompts.chunks.shape[1]
    precision = "ieee" if mixed.dtype == torch.float32 else "tf32"
    keys, queries, left = (mixed.new_empty(tokens, heads, key) for _ in range(3))
    values, out = (mixed.new_empty(tokens, heads, value) for _ in range(2))
    solved, scores = (mixed.new_empty(tokens, heads, CHUNK) for _ in range(2))
    totals = torch.empty(count, heads, dtype=torch.float32, device=mixed.device)
    wide_keys, wide_values = (max(triton.next_power_of_2(size), 16) for size in (key, value))
    gates = decay, step, log_decay, decay_bias
    strides = decay.stride(0), step.stride(0)
    _invert_chunks[(count, heads)](
        mixed, *gates, chunks, solved, count, *strides,
        KEY_HEADS=key_heads, HEADS=heads, KEY=key, VALUE=value, EPS=eps, KEYS=wide_keys, CHUNK=CHUNK,
        PRECISION=precision, num_warps=4,
    )  # fmt: skip
    _solve_chunks[(count, heads)](
        mixed, *gates, chunks, solved, keys, values, queries, left, scores, totals, count, *strides,
        KEY_HEADS=key_heads, HEADS=heads, KEY=key, VALUE=value, EPS=eps, KEYS=wide_keys, VALUES=wide_values,
        CHUNK=CHUNK, PRECISION=precision, num_warps=4,
    )  # fmt: skip
    block = min(_VALUES, wide_values)
    _scan_chunks[(triton.cdiv(value, block), heads, len(prompts.ends) - 1)](
        keys, values, queries, left, scores, totals, chunks, prompts.ends, slots, states, checkpoints, out, count,
        states.stride(0), checkpoints.stride(0),
        HEADS=heads, KEY=key, VALUE=value, KEYS=wide_keys, VALUES=block, CHUNK=CHUNK, PRECISION=precision, num_warps=4,
        num_stages=2,
    )  # fmt: skip
    return out
