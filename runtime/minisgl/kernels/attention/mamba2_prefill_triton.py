"""Mamba-2 for prompts on CUDA, in chunks of up to 64 tokens (arXiv:2405.21060, section 6).

Products take operands in the type of the inputs; states, sums and time steps are in float32.
"""

import torch
import triton
import triton.language as tl

from minisgl.kernels.attention.gates_triton import saturated, since, softplus
from minisgl.kernels.attention.prompt_chunks import CHUNK, PromptChunks

_VALUES = 32
"""Values of a head that a program computes."""


# Steps differ in the number of chunks, and gates behind rows that decode in their alignment: one kernel for all.
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["chunks", "ends", "slots", "step"])
def _scan_chunks(
    mixed, step, log_decay, step_bias, skip, chunks, ends, slots, states, checkpoints, out, count, step_stride,
    place_stride, checkpoint_stride,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, CHUNK: tl.constexpr, MOST_DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    segment, head = tl.program_id(2), tl.program_id(1)
    first, last = tl.load(ends + segment), tl.load(ends + segment + 1)
    if first < last:
        dtype = mixed.dtype.element_ty
        keys = tl.arange(0, KEYS)
        values = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
        token = tl.arange(0, CHUNK)
        mask = (keys < KEY)[:, None] & (values < VALUE)[None, :]
        matrix = head * KEY * VALUE + keys[:, None] * VALUE + values[None, :]
        own = states + matrix + tl.load(slots + segment).to(tl.int64) * place_stride
        state = tl.load(own, mask, other=0.0)
        rate, bias, direct = -tl.exp(tl.load(log_decay + head)), tl.load(step_bias + head), tl.load(skip + head)
        for chunk in range(first, last):
            inside = token < tl.load(chunks + count + chunk)
            saved = tl.load(chunks + 4 * count + chunk)
            row = (tl.load(chunks + chunk) + token).to(tl.int64)
            length = softplus(tl.load(step + row * step_stride + head, inside, other=0.0).to(tl.float32) + bias)
            length = tl.where(inside, length, 0.0)
            forget = tl.maximum(rate * length, MOST_DECAY)
            total, end = tl.cumsum(forget, 0), tl.sum(forget, 0)
            input_row = mixed + row[:, None] * (HEADS * VALUE + 2 * GROUPS * KEY)
            key_mask = inside[:, None] & (keys < KEY)[None, :]
            value_mask = inside[:, None] & (values < VALUE)[None, :]
            of_group = input_row + HEADS * VALUE + head // (HEADS // GROUPS) * KEY + keys[None, :]
            k = tl.load(of_group, key_mask, other=0.0)
            q = tl.load(of_group + GROUPS * KEY, key_mask, other=0.0)
            x = tl.load(input_row + head * VALUE + values[None, :], value_mask, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * since(total, token) * length[None, :]
            before = (q.to(tl.float32) * tl.exp(total)[:, None]).to(dtype)
            read = direct * x.to(tl.float32)
            read = tl.dot(before, state.to(dtype), read, input_precision=PRECISION)
            read = tl.dot(scores.to(dtype), x, read, input_precision=PRECISION)
            of_value = (row * HEADS + head)[:, None] * VALUE + values[None, :]
            tl.store(out + of_value, read.to(out.dtype.element_ty), value_mask)
            left = (k.to(tl.float32) * (length * tl.exp(end - total))[:, None]).to(dtype)
            state = tl.dot(tl.trans(left), x, state * tl.exp(end), input_precision=PRECISION)
            if saved >= 0:
                copy = checkpoints + matrix + saved.to(tl.int64) * checkpoint_stride
                tl.store(copy, saturated(state, checkpoints.dtype.element_ty), mask)
        tl.store(own, state, mask)


def mamba2_prompts_cuda(
    mixed: torch.Tensor,
    step: torch.Tensor,
    log_decay: torch.Tensor,
    step_bias: torch.Tensor,
    skip: torch.Tensor,
    states: torch.Tensor,
    checkpoints: torch.Tensor,
    slots: torch.Tensor,
    prompts: PromptChunks,
    groups: int,
    most_decay: float,
) -> torch.Tensor:
    """Outputs [T, heads, value_dim] of the tokens of prompts, whose states at `slots` [P] change; as `mamba2_rows_cuda`
    otherwise. `checkpoints` [count, heads, key_dim, value_dim] of any type; `most_decay`: bound of the decay of a
    token."""
    heads, key, value = states.shape[1:]
    out = mixed.new_empty(prompts.num_tokens, heads, value)
    precision = "ieee" if mixed.dtype == torch.float32 else "tf32"
    wide_keys, block = max(triton.next_power_of_2(key), 16), min(_VALUES, max(triton.next_power_of_2(value), 16))
    _scan_chunks[(triton.cdiv(value, block), heads, len(prompts.ends) - 1)](
        mixed, step, log_decay, step_bias, skip, prompts.chunks, prompts.ends, slots, states, checkpoints,
        out, prompts.chunks.shape[1], step.stride(0), states.stride(0), checkpoints.stride(0),
        GROUPS=groups, HEADS=heads, KEY=key, VALUE=value, KEYS=wide_keys, VALUES=block, CHUNK=CHUNK,
        MOST_DECAY=most_decay, PRECISION=precision, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
