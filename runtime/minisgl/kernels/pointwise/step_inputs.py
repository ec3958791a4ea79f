"""Inputs of a forward pass from the engine's tables, and storage of the sampled tokens for the next pass."""

from __future__ import annotations

import torch


def step_inputs(
    slots: torch.Tensor,
    positions: torch.Tensor,
    prefill_tokens: torch.Tensor,
    page_table: torch.Tensor,
    last_token: torch.Tensor,
    page_size: int,
    decode_tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [T] int32 and the pool locations [T] int64 at which their keys and values are stored.

    `slots` and `positions` [T] int32 are those of the decode rows, then of the prefill tokens; `prefill_tokens` are
    the ids of the latter. The token of a decode row is that of `decode_tokens` [D] int32, or `last_token` of its slot.
    """
    if slots.is_cuda:
        from minisgl.kernels.pointwise.step_inputs_triton import step_inputs_cuda

        return step_inputs_cuda(slots, positions, prefill_tokens, page_table, last_token, page_size, decode_tokens)
    decode = decode_tokens
    if decode is None:
        decode = last_token[slots[: len(slots) - len(prefill_tokens)]]
    pages = page_table[slots, positions // page_size]
    return torch.cat((decode, prefill_tokens)), pages.long() * page_size + positions % page_size


def store_last_tokens(last_token: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """Make `tokens` [S] the inputs of their slots' next step in `last_token` [R]; all int32. A negative one becomes 0.
    Where rows have the same slot, any of their tokens is stored."""
    if tokens.is_cuda:
        from minisgl.kernels.pointwise.step_inputs_triton import store_last_tokens_cuda

        store_last_tokens_cuda(last_token, slots, tokens)
        return
    last_token[slots] = tokens.clamp(min=0)
