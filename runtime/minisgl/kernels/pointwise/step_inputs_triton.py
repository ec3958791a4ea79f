"""`step_inputs` and `store_last_tokens` on CUDA: one launch each instead of seven and three."""

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch.dependent_launch_triton import dependent_launch, start_next, wait_for_previous


# Slices of a step's inputs begin at any address, and sizes change with every step: one compiled kernel for all.
@triton.jit(
    do_not_specialize=["total", "decode", "pages_per_row", "page_size", "by_slot"],
    do_not_specialize_on_alignment=["slots", "positions", "prefill_tokens"],
)
def _step_inputs(
    slots, positions, prefill_tokens, page_table, last_token, tokens, locations, total, decode, pages_per_row,
    page_size, by_slot, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < total
    slot = tl.load(slots + token, mask, other=0).to(tl.int64)
    position = tl.load(positions + token, mask, other=0)
    page = tl.load(page_table + slot * pages_per_row + position // page_size, mask, other=0).to(tl.int64)
    tl.store(locations + token, page * page_size + position % page_size, mask)
    is_decode = token < decode
    sampled = tl.load(last_token + tl.where(by_slot != 0, slot, token), mask & is_decode, other=0)
    given = tl.load(prefill_tokens + token - decode, mask & (token >= decode), other=0)
    tl.store(tokens + token, tl.where(is_decode, sampled, given), mask)


def step_inputs_cuda(
    slots: torch.Tensor,
    positions: torch.Tensor,
    prefill_tokens: torch.Tensor,
    page_table: torch.Tensor,
    last_token: torch.Tensor,
    page_size: int,
    decode_tokens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = len(slots)
    tokens = torch.empty(total, dtype=torch.int32, device=slots.device)
    locations = torch.empty(total, dtype=torch.int64, device=slots.device)
    block = 128
    sampled = last_token if decode_tokens is None else decode_tokens
    _step_inputs[(triton.cdiv(total, block),)](
        slots, positions, prefill_tokens, page_table, sampled, tokens, locations, total, total - len(prefill_tokens),
        page_table.stride(0), page_size, int(decode_tokens is None), BLOCK=block,
    )  # fmt: skip
    return tokens, locations


@triton.jit(do_not_specialize=["total"], do_not_specialize_on_alignment=["slots", "tokens"])
def _store_last_tokens(last_token, slots, tokens, total, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < total
    start_next(PDL)
    wait_for_previous(PDL)
    token = tl.maximum(tl.load(tokens + row, mask, other=0), 0)
    tl.store(last_token + tl.load(slots + row, mask, other=0), token, mask)


def store_last_tokens_cuda(last_token: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    block = 128
    _store_last_tokens[(triton.cdiv(len(tokens), block),)](
        last_token, slots, tokens, len(tokens), BLOCK=block, **dependent_launch(tokens.device)
    )
