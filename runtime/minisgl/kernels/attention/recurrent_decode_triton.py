"""One token of each of many sequences on CUDA: convolution and recurrent states, updated in place.

A step reads and writes each state once, which is what it takes: all else is small. Rows of padding have the dummy slot,
whose state is written by several programs and read by no sequence.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 256
_VALUES = 32
"""Values of a head that a program computes: with 128 keys its part of a state takes 32 registers of 128 threads."""


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _convolve_rows(
    x, inputs, weight, bias, slots, out, x_stride, place_stride, channels,
    TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < channels
    place = inputs + tl.load(slots + row).to(tl.int64) * place_stride + channel
    newest = tl.load(x + row * x_stride + channel, mask, other=0.0)
    total = newest.to(tl.float32) * tl.load(weight + channel * TAPS + TAPS - 1, mask, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + channel, mask, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS - 1):
        before = tl.load(place + tap * channels, mask, other=0.0)
        total += before.to(tl.float32) * tl.load(weight + channel * TAPS + tap, mask, other=0.0).to(tl.float32)
        if tap > 0:
            tl.store(place + (tap - 1) * channels, before, mask)
    tl.store(place + (TAPS - 2) * channels, newest.to(inputs.dtype.element_ty), mask)
    if SILU:
        total *= tl.sigmoid(total)
    tl.store(out + row * channels + channel, total.to(out.dtype.element_ty), mask)


def convolve_rows_cuda(
    x: torch.Tensor,
    inputs: torch.Tensor,
    slots: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    silu: bool,
) -> torch.Tensor:
    rows, channels = x.shape
    out = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    _convolve_rows[(rows, triton.cdiv(channels, _BLOCK))](
        x, inputs, weight, weight if bias is None else bias, slots, out, x.stride(0), inputs.stride(0), channels,
        TAPS=weight.shape[1], BIAS=bias is not None, SILU=silu, BLOCK=_BLOCK,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _gated_delta_rows(
    mixed, decay, step, states, slots, out, decay_stride, step_stride, place_stride,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, EPS: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys = tl.arange(0, KEYS)
    values = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    in_keys, in_values = keys < KEY, values < VALUE
    own = mixed + row * (2 * KEY_HEADS * KEY + HEADS * VALUE)
    key_head = head // (HEADS // KEY_HEADS)
    q = tl.load(own + key_head * KEY + keys, in_keys, other=0.0).to(tl.float32)
    k = tl.load(own + (KEY_HEADS + key_head) * KEY + keys, in_keys, other=0.0).to(tl.float32)
    v = tl.load(own + 2 * KEY_HEADS * KEY + head * VALUE + values, in_values, other=0.0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q) + EPS) * KEY**-0.5
    k *= tl.rsqrt(tl.sum(k * k) + EPS)
    place = states + tl.load(slots + row).to(tl.int64) * place_stride + head * KEY * VALUE
    place += keys[:, None] * VALUE + values[None, :]
    mask = in_keys[:, None] & in_values[None, :]
    state = tl.load(place, mask, other=0.0) * tl.exp(tl.load(decay + row * decay_stride + head))
    correction = tl.load(step + row * step_stride + head) * (v - tl.sum(state * k[:, None], 0))
    state += k[:, None] * correction[None, :]
    tl.store(place, state, mask)
    tl.store(out + (row * HEADS + head) * VALUE + values, tl.sum(state * q[:, None], 0), in_values)


def gated_delta_rows_cuda(
    mixed: torch.Tensor,
    decay: torch.Tensor,
    step: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    key_heads: int,
    eps: float,
) -> torch.Tensor:
    rows, (heads, key, value) = len(mixed), states.shape[1:]
    out = torch.empty(rows, heads, value, dtype=torch.float32, device=mixed.device)
    values = min(_VALUES, triton.next_power_of_2(value))
    _gated_delta_rows[(rows, heads, triton.cdiv(value, values))](
        mixed, decay, step, states, slots, out, decay.stride(0), step.stride(0), states.stride(0),
        KEY_HEADS=key_heads, HEADS=heads, KEY=key, VALUE=value, EPS=eps,
        KEYS=triton.next_power_of_2(key), VALUES=values,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _mamba2_rows(
    mixed, step, log_decay, skip, states, slots, out, step_stride, place_stride,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys = tl.arange(0, KEYS)
    values = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    in_keys, in_values = keys < KEY, values < VALUE
    own = mixed + row * (HEADS * VALUE + 2 * GROUPS * KEY)
    group = own + HEADS * VALUE + head // (HEADS // GROUPS) * KEY + keys
    x = tl.load(own + head * VALUE + values, in_values, other=0.0).to(tl.float32)
    k = tl.load(group, in_keys, other=0.0).to(tl.float32)
    q = tl.load(group + GROUPS * KEY, in_keys, other=0.0).to(tl.float32)
    length = tl.load(step + row * step_stride + head)
    place = states + tl.load(slots + row).to(tl.int64) * place_stride + head * KEY * VALUE
    place += keys[:, None] * VALUE + values[None, :]
    mask = in_keys[:, None] & in_values[None, :]
    state = tl.load(place, mask, other=0.0) * tl.exp(-tl.exp(tl.load(log_decay + head)) * length)
    state += k[:, None] * (x * length)[None, :]
    tl.store(place, state, mask)
    read = tl.sum(state * q[:, None], 0) + tl.load(skip + head) * x
    tl.store(out + (row * HEADS + head) * VALUE + values, read, in_values)


def mamba2_rows_cuda(
    mixed: torch.Tensor,
    step: torch.Tensor,
    log_decay: torch.Tensor,
    skip: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    groups: int,
) -> torch.Tensor:
    rows, (heads, key, value) = len(mixed), states.shape[1:]
    out = torch.empty(rows, heads, value, dtype=torch.float32, device=mixed.device)
    values = min(_VALUES, triton.next_power_of_2(value))
    _mamba2_rows[(rows, heads, triton.cdiv(value, values))](
        mixed, step, log_decay, skip, states, slots, out, step.stride(0), states.stride(0),
        GROUPS=groups, HEADS=heads, KEY=key, VALUE=value, KEYS=triton.next_power_of_2(key), VALUES=values,
    )  # fmt: skip
    return out
