"""Sample the rows with filters or logits processors, after `scan_logits`.

`sample_candidates` decides nearly all rows from a few hundred numbers each. Rows of which it needs to see more, such as
those of a flat distribution with top-p alone, are left to `sample_whole_rows`, which reads such a row a few times, with
one program per row.
"""

import triton
import triton.language as tl

from minisgl.kernels.launch.dependent_launch_triton import start_next, wait_for_previous
from minisgl.kernels.sampling import sampling_rows as columns_of
from minisgl.kernels.sampling.candidates_triton import (
    gather_candidates,
    key_of,
    kth_largest,
    logit_of,
    logits_at,
    middle_down,
    select_groups,
)
from minisgl.kernels.sampling.random_bits_triton import gumbel_noise_log2, row_keys

_TOP_K = tl.constexpr(columns_of.TOP_K)
_TOP_P = tl.constexpr(columns_of.TOP_P)
_MIN_P = tl.constexpr(columns_of.MIN_P)
_SEED_LOW = tl.constexpr(columns_of.SEED_LOW)
_SEED_HIGH = tl.constexpr(columns_of.SEED_HIGH)
_STAGES = tl.constexpr(columns_of.STAGES)
_FILTERED = tl.constexpr(columns_of.FILTERED)
_PENALIZED = tl.constexpr(columns_of.PENALIZED)
_UNIT = tl.constexpr(columns_of.WEIGHT_UNIT)
_LOWEST = tl.constexpr(-0x7F800001)
"""Below the key of every number."""


@triton.jit
def _filters(table, table_stride, slot, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr):
    """Temperature and its inverse, top-k, top-p and min-p of a row.

    The columns are parameters: if a function that two kernels call used constants of this file, the names of the
    kernels in Triton's cache would depend on which of them is compiled first.
    """
    temperature = tl.load(table + slot).to(tl.float32, bitcast=True)
    top_k = tl.load(table + TOP_K * table_stride + slot)
    top_p = tl.load(table + TOP_P * table_stride + slot).to(tl.float32, bitcast=True)
    min_p = tl.load(table + MIN_P * table_stride + slot).to(tl.float32, bitcast=True)
    return temperature, tl.div_rn(1.0, temperature), top_k, top_p, min_p


@triton.jit
def _keys(table, table_stride, slot, position, SEED_LOW: tl.constexpr, SEED_HIGH: tl.constexpr):
    """`row_keys` of a row's seed."""
    low = tl.load(table + SEED_LOW * table_stride + slot)
    return row_keys(low, tl.load(table + SEED_HIGH * table_stride + slot), position)


@triton.jit
def _weight(logit, largest, inverse):
    """int64 weight in units of 2^-30 of the largest: sums are the same in any order."""
    return tl.floor(tl.exp((logit - largest) * inverse) * 1073741824.0 + 0.5).to(tl.int64)


@triton.jit
def _min_p_limit(largest, temperature, min_p):
    """Smallest logit that min-p keeps."""
    limit = largest * 0.0 + float("-inf")
    if min_p > 0.0:
        limit = largest + temperature * tl.log(min_p)
    return tl.minimum(limit, largest)


@triton.jit
def _best(logit, column, keep, inverse, first, second):
    """Largest score of the columns to `keep`, and the lowest column that has it."""
    score = logit * inverse - 0.6931471805599453 * gumbel_noise_log2(first, second, column)
    score = tl.where(keep, score, float("-inf"))
    best = tl.max(score, 0)
    return best, tl.min(tl.where(keep & (score == best), column, 0x7FFFFFFF), 0)


@triton.jit
def _store_token(token, row, slot, penalized, tokens, last_token, counts, columns):
    token = tl.minimum(token, columns - 1)
    tl.store(tokens + row, token)
    tl.store(last_token + slot, token)
    if penalized:
        place = counts + slot.to(tl.int64) * columns + token
        count = tl.load(place)
        # A token that has been generated 16,383 times is not counted further.
        tl.store(place, tl.where(count < 32766, count + 2, count).to(tl.int16))


@triton.jit(
    do_not_specialize=["table_stride", "parts"], do_not_specialize_on_alignment=["slots", "positions", "tokens"]
)
def sample_candidates(
    logits, row_stride, columns, table, table_stride, slots, positions, tokens, last_token, counts, changed_stages,
    changed_logits, maxima, sums, sums_above, groups, scores, indices, parts, chosen, found, found_at, undecided,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, CHOSEN: tl.constexpr, FOUND: tl.constexpr,
    USUAL: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`undecided` [S]: 1 for rows that are left to `sample_whole_rows`."""
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    stages = tl.load(table + _STAGES * table_stride + slot)
    # Also rows that only pad the batch, for which the workspace has no place.
    if stages == 0:
        return
    token = tl.load(tokens + row)
    position = tl.load(positions + row)
    changes = tl.load(changed_stages + row)
    filtered = (stages & _FILTERED) != 0
    # A row without a valid token has logits that are not finite.
    if (token < 0) | ((changes == 0) & (filtered == 0)):
        tl.store(undecided + row, 0)
        return
    logits += row.to(tl.int64) * row_stride
    open = 0
    if filtered:
        open = 1
        changed = changes != 0
        changed_logits += row.to(tl.int64) * columns
        temperature, inverse, top_k, top_p, min_p = _filters(table, table_stride, slot, _TOP_K, _TOP_P, _MIN_P)
        limited = (top_k > 0) & (top_k < columns)
        shift = tl.where(changed, 0, SHIFT)

        group = tl.arange(0, BLOCK)
        at = row.to(tl.int64) * groups + group
        exists = group < groups
        most = tl.load(maxima + at, exists, other=float("-inf"))
        largest = tl.max(most, 0)
        limit = _min_p_limit(largest, temperature, min_p)
        total = largest.to(tl.float64) * 0.0
        if (limited == 0) & (top_p < 1.0):
            relative = tl.exp((most - largest) * inverse)
            total += tl.sum(tl.load(sums + at, exists, other=0.0) * relative, 0).to(tl.float64) * _UNIT
            above = tl.sum(tl.load(sums_above + at, exists, other=0.0) * relative, 0).to(tl.float64) * _UNIT
            if (changed == 0) & (above < tl.maximum(top_p.to(tl.float64) * total, 1.0)):
                # The best of all tokens passes top-p, so it is the best of those that pass.
                open = tl.where(tl.load(logits + token).to(tl.float32) >= limit, 0, 1)
        elif (limited == 0) & (changed == 0):
            open = tl.where(tl.load(logits + token).to(tl.float32) >= limit, 0, 1)

        wanted = tl.where(limited, top_k, tl.minimum(USUAL, (groups + 3) // 4))
        if (open == 1) & (wanted <= CHOSEN // 2):
            keys = tl.where(exists, key_of(most) >> shift, _LOWEST)
            high = key_of(largest) >> shift
            # Fewer groups than wanted columns: all columns are candidates.
            everything = wanted > groups
            low = key_of(tl.min(tl.where(exists, most, largest), 0)) >> shift
            if everything:
                low = high * 0 + (_LOWEST >> shift)
            else:
                low = kth_largest(keys, wanted, low, high, wanted)
            chosen += row * CHOSEN
            found += row * FOUND
            found_at += row * FOUND
            selected = select_groups(keys, groups, low - 1, chosen, 0, CHOSEN, False, BLOCK)
            tl.debug_barrier()
            number = FOUND + 1
            if selected <= CHOSEN:
                number = gather_candidates(
                    logits, changed_logits, changed, columns, chosen, selected, low - 1, shift, found, found_at, 0,
                    FOUND, False, CHUNK,
                )  # fmt: skip
                tl.debug_barrier()
            if number <= FOUND:
                lane = tl.arange(0, FOUND)
                valid = lane < number
                logit = tl.load(found + lane, valid, other=float("-inf"))
                column = tl.load(found_at + lane, valid, other=0)
                order = tl.where(valid, key_of(logit) >> shift, -2147483648)
                floor = low
                if limited:
                    floor = kth_largest(order, top_k, low, high, 0)
                known = limited
                if top_p < 1.0:
                    weight = tl.where(valid & (order >= floor), _weight(logit, largest, inverse), 0)
                    of_candidates = tl.sum(weight, 0).to(tl.float64)
                    if limited:
                        total = of_candidates
                    target = tl.maximum(top_p.to(tl.float64) * total, 1.0)
                    if of_candidates >= target:
                        known = known | True
                        # Smallest key above which less than the target lies: `above_p` always is such a key.
                        above_p = high
                        while floor < above_p:
                            middle = middle_down(floor, above_p)
                            if tl.sum(tl.where(order > middle, weight, 0), 0).to(tl.float64) < target:
                                above_p = middle
                            else:
                                floor = middle + 1
                bound = logit_of(floor << shift)
                if known:
                    limit = tl.minimum(tl.maximum(limit, bound), largest)
                if everything | known | (limit >= bound):
                    first, second = _keys(table, table_stride, slot, position, _SEED_LOW, _SEED_HIGH)
                    _, token = _best(logit, column, valid & (logit >= limit), inverse, first, second)
                    open = 0
    else:
        part = tl.arange(0, PARTS)
        score = tl.load(scores + row * parts + part, part < parts, other=float("-inf"))
        index = tl.load(indices + row * parts + part, part < parts, other=0x7FFFFFFF)
        token = tl.min(tl.where(score == tl.max(score, 0), index, 0x7FFFFFFF), 0)
    tl.store(undecided + row, open)
    if open == 0:
        _store_token(token, row, slot, (stages & _PENALIZED) != 0, tokens, last_token, counts, columns)


@triton.jit
def _count_from(logits, changed_logits, changed, columns, key, shift, BLOCK: tl.constexpr):
    """Columns whose key is at least `key`."""
    lane = tl.arange(0, BLOCK)
    count = tl.zeros((BLOCK,), tl.int32)
    following = logits_at(logits, changed_logits, changed, lane, lane < columns)
    for start in range(0, columns, BLOCK):
        order = key_of(following) >> shift
        after = start + BLOCK + lane
        following = logits_at(logits, changed_logits, changed, after, after < columns)
        count += ((order >= key) & (start + lane < columns)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def _best_above(
    logits, changed_logits, changed, columns, bound, floor, limit, largest, inverse, first, second, BLOCK: tl.constexpr
):  # fmt: skip
    """Weight of the columns whose logit is above `bound` and at least `floor`, in units of the largest, and the column
    with the best score of those that are also at least `limit`."""
    lane = tl.arange(0, BLOCK)
    weight = tl.zeros((BLOCK,), tl.float32)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    following = logits_at(logits, changed_logits, changed, lane, lane < columns)
    for start in range(0, columns, BLOCK):
        logit = following
        # The next logits are read while these are used.
        after = start + BLOCK + lane
        following = logits_at(logits, changed_logits, changed, after, after < columns)
        take = (logit > bound) & (logit >= floor)
        weight += tl.where(take, tl.exp((logit - largest) * inverse), 0.0)
        score = logit * inverse - 0.6931471805599453 * gumbel_noise_log2(first, second, start + lane)
        score = tl.where(take & (logit >= limit), score, float("-inf"))
        # Each lane visits its columns in ascending order and keeps the first of equal scores.
        where = tl.where(score > best, start + lane, where)
        best = tl.maximum(best, score)
    most = tl.max(best, 0)
    return tl.sum(weight, 0), tl.min(tl.where(best == most, where, 0x7FFFFFFF), 0)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["slots", "positions", "tokens"])
def sample_whole_rows(
    logits, row_stride, columns, table, table_stride, slots, positions, tokens, last_token, counts, changed_stages,
    changed_logits, maxima, sums, groups, undecided,
    SHIFT: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    stages = tl.load(table + _STAGES * table_stride + slot)
    if (stages & _FILTERED) == 0:
        return
    if tl.load(undecided + row) == 0:
        return
    position = tl.load(positions + row)
    changed = tl.load(changed_stages + row) != 0
    shift = tl.where(changed, 0, SHIFT)
    logits += row.to(tl.int64) * row_stride
    changed_logits += row.to(tl.int64) * columns
    temperature, inverse, top_k, top_p, min_p = _filters(table, table_stride, slot, _TOP_K, _TOP_P, _MIN_P)
    first, second = _keys(table, table_stride, slot, position, _SEED_LOW, _SEED_HIGH)

    group = tl.arange(0, GROUPS)
    at = row.to(tl.int64) * groups + group
    most = tl.load(maxima + at, group < groups, other=float("-inf"))
    largest = tl.max(most, 0)
    bound = largest * 0.0 + float("-inf")
    floor = bound
    target = largest * 0.0 - 1.0
    if (top_k > 0) & (top_k < columns):
        low = key_of(largest) * 0 + (_LOWEST >> shift)
        high = key_of(largest) >> shift
        if top_k <= groups:
            # Every group has a column that reaches the smallest of their maxima.
            low = key_of(tl.min(tl.where(group < groups, most, largest), 0)) >> shift
        while low < high:
            middle = (low | high) - ((low ^ high) >> 1)
            if _count_from(logits, changed_logits, changed, columns, middle, shift, BLOCK) >= top_k:
                low = middle
            else:
                high = middle - 1
        floor = logit_of(low << shift)
    else:
        target = largest * 0.0
        if top_p < 1.0:
            weight = tl.load(sums + at, group < groups, other=0.0) * tl.exp((most - largest) * inverse)
            target = tl.maximum(top_p * tl.sum(weight, 0), 9.313225746154785e-10)
        if changed == 0:
            # The plain sample has failed, and with it all tokens that are not above it.
            bound = tl.load(logits + tl.load(tokens + row)).to(tl.float32)
    limit = _min_p_limit(largest, temperature, min_p)

    # The best of all tokens above a bound is the sample if it passes top-p. Otherwise it is the next bound: nothing
    # below it passes either. Each turn leaves about half of the probability that does not pass, and the most likely
    # token always passes.
    token = slot * 0 - 1
    open = 1
    while open == 1:
        above, found = _best_above(
            logits, changed_logits, changed, columns, bound, floor, limit, largest, inverse, first, second, BLOCK
        )  # fmt: skip
        # Whatever the sums are, the loop ends where nothing is above the bound.
        if (token >= 0) & (((above >= target) == 0) | (found >= columns)):
            open = 0
        else:
            if target < 0.0:
                target = tl.maximum(top_p * above, 9.313225746154785e-10)
            token = found
            bound = tl.max(logits_at(logits, changed_logits, changed, token + tl.arange(0, 1), token < columns), 0)
            if top_p >= 1.0:
                open = 0
    _store_token(token, row, slot, (stages & _PENALIZED) != 0, tokens, last_token, counts, columns)
