"""Log-probabilities of sampled and most likely tokens, after `scan_logits`: one program per row, which reads the groups
of columns that can have one of the largest logits."""

import triton
import triton.language as tl

from minisgl.kernels.launch.dependent_launch_triton import start_next, wait_for_previous
from minisgl.kernels.sampling import sampling_rows as columns_of
from minisgl.kernels.sampling.candidates_triton import gather_candidates, key_of, kth_largest, select_groups

_STAGES = tl.constexpr(columns_of.STAGES)
_REPORTED = tl.constexpr(columns_of.REPORTED)
_TOPS = tl.constexpr(columns_of.TOPS)
_LOWEST = tl.constexpr(-0x7F800001)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["slots", "tokens"])
def report_logprobs(
    logits, row_stride, columns, table, table_stride, slots, tokens, raw_maxima, raw_sums, groups, chosen, found,
    found_at, reports, SHIFT: tl.constexpr, BLOCK: tl.constexpr, CHOSEN: tl.constexpr, FOUND: tl.constexpr,
    CHUNK: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`reports` [S, 1 + 2 MOST] int32; a row with K < MOST tokens leaves the other numbers as they are."""
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if (tl.load(table + _STAGES * table_stride + slot) & _REPORTED) == 0:
        return
    tops = tl.minimum(tl.minimum(tl.load(table + _TOPS * table_stride + slot), MOST), columns)
    logits += row.to(tl.int64) * row_stride
    reports += row * (1 + 2 * MOST)
    group = tl.arange(0, BLOCK)
    exists = group < groups
    at = row.to(tl.int64) * groups + group
    most = tl.load(raw_maxima + at, exists, other=float("-inf"))
    largest = tl.max(most, 0)
    total = tl.sum(tl.load(raw_sums + at, exists, other=0.0) * tl.exp(most - largest), 0)
    total = largest + tl.log(total)
    own = tl.load(logits + tl.maximum(tl.load(tokens + row), 0)).to(tl.float32)
    tl.store(reports, (own - total).to(tl.int32, bitcast=True))
    # A row whose logits are not finite has no most likely tokens; the numbers of an earlier step must not stay.
    if total != total:
        for rank in range(tops):
            tl.store(reports + 1 + rank, 0)
            tl.store(reports + 1 + MOST + rank, 0)
    elif tops > 0:
        keys = tl.where(exists, key_of(most) >> SHIFT, _LOWEST)
        low = tl.min(tl.where(exists, keys, 0x7FFFFFFF), 0)
        if tops > groups:
            low = low * 0 + (_LOWEST >> SHIFT)
        else:
            low = kth_largest(keys, tops, low, key_of(largest) >> SHIFT, 0)
        chosen += row * CHOSEN
        found += row * FOUND
        found_at += row * FOUND
        # Fewer than K groups are above the bound, so these columns fit; those equal to it fill the remaining places.
        selected = select_groups(keys, groups, low, chosen, 0, CHOSEN, False, BLOCK)
        selected = select_groups(keys, groups, low, chosen, selected, CHOSEN, True, BLOCK)
        selected = tl.minimum(selected, CHOSEN)
        tl.debug_barrier()
        number = gather_candidates(
            logits, logits, False, columns, chosen, selected, low, SHIFT, found, found_at, 0, FOUND, False, CHUNK
        )  # fmt: skip
        number = gather_candidates(
            logits, logits, False, columns, chosen, selected, low, SHIFT, found, found_at, number, FOUND, True, CHUNK
        )  # fmt: skip
        tl.debug_barrier()
        lane = tl.arange(0, FOUND)
        valid = lane < number
        logit = tl.load(found + lane, valid, other=float("-inf"))
        column = tl.load(found_at + lane, valid, other=0x7FFFFFFF)
        for rank in range(tops):
            best = tl.max(logit, 0)
            token = tl.min(tl.where(logit == best, column, 0x7FFFFFFF), 0)
            logit = tl.where(column == token, float("-inf"), logit)
            tl.store(reports + 1 + rank, token)
            tl.store(reports + 1 + MOST + rank, (best - total).to(tl.int32, bitcast=True))
