"""One token of each of many sequences on CUDA: convolution and recurrent states, updated in place.

A step reads and writes each state once, which is what it takes: all else is small. Rows of padding have the dummy slot,
whose state is written by several programs and read by no sequence.
"""

import torch
import triton
import triton.language as tl

from minisgl.kernels.attention.gates_triton import delta_gates, softplus
from minisgl.kernels.launch.dependent_launch_triton import dependent_launch, start_next, wait_for_previous

_BLOCK = 256
_VALUES = 64
"""Values of a head that a program computes: with 128 keys its part of a state takes 64 registers of 128 threads. With
32, each row of it is one line of the cache, and a tenth of the bandwidth is lost."""


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _convolve_rows(
    x, inputs, weight, bias, slots, out, x_stride, place_stride, channels,
    TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < channels
    place = inputs + tl.load(slots + row).to(tl.int64) * place_stride + channel
    total = tl.load(bias + channel, mask, other=0.0).to(tl.float32) if BIAS else tl.zeros((BLOCK,), tl.float32)
    factor = tl.load(weight + channel * TAPS + TAPS - 1, mask, other=0.0).to(tl.float32)
    start_next(PDL)
    wait_for_previous(PDL)
    newest = tl.load(x + row * x_stride + channel, mask, other=0.0)
    total += newest.to(tl.float32) * factor
    for tap in tl.static_range(TAPS - 1):
        before = tl.load(place + tap * channels, mask, other=0.0)
        total += before.to(tl.float32) * tl.load(weight + channel * TAPS + tap, mask, other=0.0).to(tl.float32)
        if tap > 0:
            tl.store(place + (tap - 1) * channels, before, mask)
    if TAPS > 1:
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
        TAPS=weight.shape[1], BIAS=bias is not None, SILU=silu, BLOCK=_BLOCK, **dependent_launch(x.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _gated_delta_rows(
    mixed, decay, step, log_decay, decay_bias, states, slots, out, decay_stride, step_stride, place_stride,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, EPS: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys = tl.arange(0, KEYS)
    values = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    in_keys, in_values = keys < KEY, values < VALUE
    place = states + tl.load(slots + row).to(tl.int64) * place_stride + head * KEY * VALUE
    place += keys[:, None] * VALUE + values[None, :]
    mask = in_keys[:, None] & in_values[None, :]
    # The step before this one has ended.
    state = tl.load(place, mask, other=0.0)
    rate, bias = tl.load(log_decay + head), tl.load(decay_bias + head)
    start_next(PDL)
    wait_for_previous(PDL)
    own = mixed + row * (2 * KEY_HEADS * KEY + HEADS * VALUE)
    key_head = head // (HEADS // KEY_HEADS)
    q = tl.load(own + key_head * KEY + keys, in_keys, other=0.0).to(tl.float32)
    k = tl.load(own + (KEY_HEADS + key_head) * KEY + keys, in_keys, other=0.0).to(tl.float32)
    v = tl.load(own + 2 * KEY_HEADS * KEY + head * VALUE + values, in_values, other=0.0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q) + EPS) * KEY**-0.5
    k *= tl.rsqrt(tl.sum(k * k) + EPS)
    raw_decay, raw_step = tl.load(decay + row * decay_stride + head), tl.load(step + row * step_stride + head)
    forget, strength = delta_gates(raw_decay, raw_step, rate, bias)
    state *= tl.exp(forget)
    state += k[:, None] * (strength * (v - tl.sum(state * k[:, None], 0)))[None, :]
    tl.store(place, state, mask)
    read = tl.sum(state * q[:, None], 0)
    tl.store(out + (row * HEADS + head) * VALUE + values, read.to(out.dtype.element_ty), in_values)


def gated_delta_rows_cuda(
    mixed: torch.Tensor,
    decay: torch.Tensor,
    step: torch.Tensor,
    log_decay: torch.Tensor,
    decay_bias: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    key_heads: int,
    eps: float,
) -> torch.Tensor:
    """`mixed` [N, channels]; decay and step [N, heads] as projected; the logarithm of a head's decay and its bias
    [heads] float32; states [places, heads, key_dim, value_dim] float32, which change at `slots` [N]. Returns [N, heads,
    value_dim] in the type of `mixed`."""
    rows, (heads, key, value) = len(mixed), states.shape[1:]
    out = mixed.new_empty(rows, heads, value)
    values = min(_VALUES, triton.next_power_of_2(value))
    _gated_delta_rows[(rows, heads, triton.cdiv(value, values))](
        mixed, decay, step, log_decay, decay_bias, states, slots, out, decay.stride(0), step.stride(0),
        states.stride(0),
        KEY_HEADS=key_heads, HEADS=heads, KEY=key, VALUE=value, EPS=eps, KEYS=triton.next_power_of_2(key),
        VALUES=values, **dependent_launch(mixed.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _mamba2_rows(
    mixed, step, log_decay, step_bias, skip, states, slots, out, step_stride, place_stride,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys = tl.arange(0, KEYS)
    values = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    in_keys, in_values = keys < KEY, values < VALUE
    place = states + tl.load(slots + row).to(tl.int64) * place_stride + head * KEY * VALUE
    place += keys[:, None] * VALUE + values[None, :]
    mask = in_keys[:, None] & in_values[None, :]
    # The step before this one has ended.
    state = tl.load(place, mask, other=0.0)
    rate, bias, direct = -tl.exp(tl.load(log_decay + head)), tl.load(step_bias + head), tl.load(skip + head)
    start_next(PDL)
    wait_for_previous(PDL)
    own = mixed + row * (HEADS * VALUE + 2 * GROUPS * KEY)
    group = own + HEADS * VALUE + head // (HEADS // GROUPS) * KEY + keys
    x = tl.load(own + head * VALUE + values, in_values, other=0.0).to(tl.float32)
    k = tl.load(group, in_keys, other=0.0).to(tl.float32)
    q = tl.load(group + GROUPS * KEY, in_keys, other=0.0).to(tl.float32)
    length = softplus(tl.load(step + row * step_stride + head).to(tl.float32) + bias)
    state = state * tl.exp(rate * length) + k[:, None] * (x * length)[None, :]
    tl.store(place, state, mask)
    read = tl.sum(state * q[:, None], 0) + direct * x
    tl.store(out + (row * HEADS + head) * VALUE + values, read.to(out.dtype.element_ty), in_values)


def mamba2_rows_cuda(
    mixed: torch.Tensor,
    step: torch.Tensor,
    log_decay: torch.Tensor,
    step_bias: torch.Tensor,
    skip: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    groups: int,
) -> torch.Tensor:
    """`mixed` [N, channels]; time steps [N, heads] as projected; the logarithm of a head's decay, the bias of its time
    step, and what goes past its state [heads] float32; states [places, heads, key_dim, value_dim] float32, which change
    at `slots` [N]. Returns [N, heads, value_dim] in the type of `mixed`."""
    rows, (heads, key, value) = len(mixed), states.shape[1:]
    out = mixed.new_empty(rows, heads, value)
    values = min(_VALUES, triton.next_power_of_2(value))
    _mamba2_rows[(rows, heads, triton.cdiv(value, values))](
        mixed, step, log_decay, step_bias, skip, states, slots, out, step.stride(0), states.stride(0),
        GROUPS=groups, HEADS=heads, KEY=key, VALUE=value, KEYS=triton.next_power_of_2(key), VALUES=values,
        **dependent_launch(mixed.device),
    )  # fmt: skip
    return out
