"""Convolution over time of the tokens of prompts on CUDA, and the last inputs of each sequence."""

import torch
import triton
import triton.language as tl

from minisgl.kernels.attention.prompt_chunks import CHUNK, PromptChunks

_BLOCK = 64
_KEPT_BLOCK = 256


# Steps differ in the number of chunks: one kernel for all.
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["chunks"])
def _convolve_chunks(
    x, inputs, checkpoints, weight, bias, chunks, out, count, x_stride, place_stride, checkpoint_stride, channels,
    TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    length = tl.load(chunks + count + chunk)
    if length > 0:
        begin, before = tl.load(chunks + chunk).to(tl.int64), tl.load(chunks + 2 * count + chunk)
        slot, saved = tl.load(chunks + 3 * count + chunk).to(tl.int64), tl.load(chunks + 4 * count + chunk)
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = channel < channels
        token = tl.arange(0, CHUNK)
        kept = inputs + slot * place_stride + channel
        total = tl.zeros((CHUNK, BLOCK), tl.float32)
        if BIAS:
            total += tl.load(bias + channel, mask, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(TAPS):
            back = TAPS - 1 - tap
            known = (token >= back - before) & (token < length)
            value = tl.load(
                x + (begin + token - back)[:, None] * x_stride + channel[None, :], known[:, None] & mask[None, :],
                other=0.0,
            )  # fmt: skip
            if before < back:
                # Inputs of earlier steps.
                at = TAPS - 1 + before + token - back
                earlier = tl.load(
                    kept[None, :] + at[:, None] * channels, (at < TAPS - 1)[:, None] & mask[None, :], other=0.0
                )  # fmt: skip
                value += earlier.to(value.dtype)
            factor = tl.load(weight + channel * TAPS + tap, mask, other=0.0).to(tl.float32)
            total += value.to(tl.float32) * factor[None, :]
        if SILU:
            total *= tl.sigmoid(total)
        tl.store(
            out + (begin + token)[:, None] * channels + channel[None, :], total.to(out.dtype.element_ty),
            (token < length)[:, None] & mask[None, :],
        )  # fmt: skip
        if saved >= 0:
            copy = checkpoints + saved.to(tl.int64) * checkpoint_stride + channel
            for tap in tl.static_range(TAPS - 1):
                back = length - (TAPS - 1) + tap
                from_step, from_state = mask & (before + back >= 0), mask & (before + back < 0)
                last = tl.load(x + (begin + back) * x_stride + channel, from_step, other=0.0)
                last += tl.load(kept + (TAPS - 1 + before + back) * channels, from_state, other=0.0).to(last.dtype)
                tl.store(copy + tap * channels, last.to(inputs.dtype.element_ty), mask)


@triton.jit(do_not_specialize_on_alignment=["offsets", "slots"])
def _keep_inputs(
    x, inputs, offsets, slots, x_stride, place_stride, channels, TAPS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    segment = tl.program_id(0)
    begin, end = tl.load(offsets + segment).to(tl.int64), tl.load(offsets + segment + 1).to(tl.int64)
    length = end - begin
    if length > 0:
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = channel < channels
        kept = inputs + tl.load(slots + segment).to(tl.int64) * place_stride + channel
        # In ascending order: an earlier input moves to a place that has been read.
        for tap in tl.static_range(TAPS - 1):
            back = length - (TAPS - 1) + tap
            last = tl.load(x + (begin + back) * x_stride + channel, mask & (back >= 0), other=0.0)
            last += tl.load(kept + (tap + length) * channels, mask & (back < 0), other=0.0).to(last.dtype)
            tl.store(kept + tap * channels, last.to(inputs.dtype.element_ty), mask)


def convolve_prompts_cuda(
    x: torch.Tensor,
    inputs: torch.Tensor,
    checkpoints: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
    prompts: PromptChunks,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    silu: bool,
) -> torch.Tensor:
    """Tokens of prompts x [T, C], those of segment p from `offsets`[p] on, behind the inputs [places, K − 1, C] at
    `slots` [P], which become the last ones. Returns [T, C]. `checkpoints` [count, K − 1, C]."""
    channels, count = x.shape[1], prompts.chunks.shape[1]
    out = x.new_empty(x.shape)
    _convolve_chunks[(count, triton.cdiv(channels, _BLOCK))](
        x, inputs, checkpoints, weight, weight if bias is None else bias, prompts.chunks, out, count, x.stride(0),
        inputs.stride(0), checkpoints.stride(0), channels,
        TAPS=weight.shape[1], BIAS=bias is not None, SILU=silu, CHUNK=CHUNK, BLOCK=_BLOCK,
    )  # fmt: skip
    _keep_inputs[(len(slots), triton.cdiv(channels, _KEPT_BLOCK))](
        x, inputs, offsets, slots, x.stride(0), inputs.stride(0), channels, TAPS=weight.shape[1], BLOCK=_KEPT_BLOCK
    )
    return out
