"""`verify_drafts` on CUDA: one launch, with a program for each row."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch.dependent_launch_triton import dependent_launch, start_next, wait_for_previous
from minisgl.kernels.speculation.row_text_tables import NO_TOKEN, RowTextTables
from minisgl.kernels.speculation.step_rows import SampledRows
from minisgl.wire.messages import MOST_DRAFTS
from minisgl.wire.row_texts import LEAST_MATCHED, MATCHED_TOKENS

_BLOCK: Final = 4096
"""Places that are searched at a time: few programs run, so each has as many reads in flight as it can."""
_WARPS: Final = 16
_MOST_PLACES: Final = 1 << 24
_EXPECTED = tl.constexpr(_MOST_PLACES)
_PREDICTED = tl.constexpr(2 * _MOST_PLACES)
_MATCH = tl.constexpr(4 * _MOST_PLACES)
"""Parts of a number that compares places: where the last drafts would go on; in the predicted text; for each token that
matches."""
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_MOST_DRAFTS = tl.constexpr(MOST_DRAFTS)
_LEAST_MATCHED = tl.constexpr(LEAST_MATCHED)
_MATCHED_TOKENS = tl.constexpr(MATCHED_TOKENS)


@triton.jit
def _matching(text, end, place, number, some):
    """Those of `some` places [BLOCK] before which the same token is as `number` tokens before the end."""
    some &= place > number
    token = tl.load(text + tl.maximum(end - 1 - number, 0))
    text -= 1 + number
    return some & (tl.load(text + place, some, other=0) == token)


@triton.jit
def _matched_tokens(text, end, place, some):
    """How many tokens match before each of `some` places, which have the least number of them."""
    count = tl.where(some, _LEAST_MATCHED, 0)
    for number in range(_LEAST_MATCHED, _MATCHED_TOKENS):
        some = _matching(text, end, place, number, some)
        count += some.to(tl.int32)
    return count


@triton.jit
def _best_place(text, end, predicted, expected, BLOCK: tl.constexpr):
    """`find_drafts`: place of the drafts in a text of `end` tokens; `end`: none."""
    best = end * 0
    # Older places can only be better if more tokens match, if they are in the predicted text, or the expected one.
    enough = tl.where(predicted > 0, _PREDICTED, 0) + _MATCHED_TOKENS * _MATCH
    stop = end
    while (stop > 1) & (best < enough + tl.where(expected < stop, _EXPECTED, 0)):
        place = stop - BLOCK + tl.arange(0, BLOCK)
        some = place > 0
        for number in tl.static_range(_LEAST_MATCHED):
            some = _matching(text, end, place, number, some)
        # In most blocks there is none.
        if tl.max(some.to(tl.int32), 0) > 0:
            matches = _matched_tokens(text, end, place, some)
            value = matches * _MATCH + tl.where(place < predicted, _PREDICTED, 0) + place
            value += tl.where(place == expected, _EXPECTED, 0)
            best = tl.maximum(best, tl.max(tl.where(some, value, 0), 0))
        stop -= BLOCK
    otherwise = tl.where((expected > 0) & (expected < predicted), expected, end)
    return tl.where(best > 0, best & (_EXPECTED - 1), otherwise)


# Slices of a step's inputs begin at any address, and sizes change with every step: one compiled kernel for all.
@triton.jit(
    do_not_specialize=["capacity", "rows"],
    do_not_specialize_on_alignment=[
        "slots", "first", "widths", "tokens", "sample_positions", "next_position", "limit", "origin", "sources",
        "texts",
    ],
)  # fmt: skip
def _verify_drafts(
    slots, first, widths, tokens, sample_positions, next_position, limit, origin, sources, texts, report, capacity,
    rows, BLOCK: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Only the sampled tokens are newer than the last ordinary launch.
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    start = tl.load(first + row)
    width = tl.load(widths + row)
    position = tl.load(sample_positions + start)
    room = tl.load(limit + slot) - position
    before = tl.load(origin + slot)
    source = tl.load(sources + slot)
    begin = before + position
    text = texts + slot * capacity
    # A lane is one thread: all warps agree on `count`, even if another program writes to the slot, as in a warm-up.
    lane = tl.arange(0, LANES)
    old = tl.load(text + begin + lane, (lane < _MOST_DRAFTS) & (begin + lane < capacity), other=_NO_TOKEN)
    start_next(PDL)
    wait_for_previous(PDL)
    sampled = tl.load(tokens + start + lane, lane < width, other=_NO_TOKEN)
    is_draft = old != _NO_TOKEN
    offered = tl.min(tl.where(is_draft, LANES, lane), 0)
    right = is_draft & (sampled == old)
    accepted = tl.min(tl.where(right & (lane < width - 1), LANES, lane), 0)
    count = tl.maximum(tl.minimum(1 + accepted, room), 1)
    # All warps have read what is now replaced.
    tl.debug_barrier()
    tl.store(text + begin + lane, sampled, lane < count)
    tl.store(next_position + slot, position + count - 1)
    tl.store(report + row, count)
    tl.store(report + rows + row, offered)
    tl.store(report + 2 * rows + row, tl.max((right & (lane == 0)).to(tl.int32), 0))
    tl.store(report + 3 * rows + row, ((source > 0) & (source < before)).to(tl.int32))
    # The search reads what was just stored.
    tl.debug_barrier()
    end = begin + count
    place = _best_place(text, end, before, tl.where(source > 0, source + count, 0), BLOCK)
    # Behind the end the text is taken to go on as it does since `place`.
    found = place + lane % tl.maximum(end - place, 1)
    draft = tl.load(text + found, (lane < _MOST_DRAFTS) & (place < end), other=_NO_TOKEN)
    tl.store(text + end + lane, draft, (lane < _MOST_DRAFTS) & (end + lane < capacity))
    tl.store(sources + slot, place)


def verify_drafts_cuda(
    tables: RowTextTables, rows: SampledRows, tokens: torch.Tensor, sample_positions: torch.Tensor
) -> torch.Tensor:
    count, capacity = len(rows.slots), tables.texts.stride(0)
    assert capacity <= _MOST_PLACES
    report = torch.empty((4, count), dtype=torch.int32, device=tokens.device)
    _verify_drafts[(count,)](
        *rows, tokens, sample_positions, tables.next_position, tables.limit, tables.origin, tables.source,
        tables.texts, report, capacity, count, BLOCK=_BLOCK, LANES=32 * _WARPS, num_warps=_WARPS,
        **dependent_launch(tokens.device),
    )  # fmt: skip
    return report
