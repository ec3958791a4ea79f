# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Sample the rows with filters or logits processors, after `scan_logits`.

`sample_candidates` decides nearly all rows from a few hundred numbers each. Rows of which it needs to see more, such as
those of a flat distribution with top-p alone, are left to `sample_whole_rows`, which reads a row in every step of a
bisection, with one program per row.
"""

import triton
import triton.language as tl

from minisgl.kernels import sampling_rows as columns_of
from minisgl.kernels.candidates_triton import gather_candidates, logits_at, select_groups
from minisgl.kernels.dependent_launch_triton import start_next, wait_for_previous
from minisgl.kernels.logit_keys_triton import key_of, kth_largest, logit_of, middle_down
from minisgl.kernels.random_bits_triton import gumbel_noise_log2, row_keys

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
        temperature = tl.load(table + slot).to(tl.float32, bitcast=True)
        inverse = tl.div_rn(1.0, temperature)
        top_k = tl.load(table + _TOP_K * table_stride + slot)
        top_p = tl.load(table + _TOP_P * table_stride + slot).to(tl.float32, bitcast=True)
        min_p = tl.load(table + _MIN_P * table_stride + slot).to(tl.float32, bitcast=True)
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
                    first, second = row_keys(
                        tl.load(table + _SEED_LOW * table_stride + slot),
                        tl.load(table + _SEED_HIGH * table_stride + slot),
                        position,
                    )
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
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        order = key_of(logits_at(logits, changed_logits, changed, column, column < columns)) >> shift
        count += ((order >= key) & (column < columns)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def _weight_above(
    logits, changed_logits, changed, columns, key, shift, floor, largest, inverse, BLOCK: tl.constexpr
):  # fmt: skip
    """Weight of the columns whose key is above `key` and at least `floor`."""
    weight = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = logits_at(logits, changed_logits, changed, column, column < columns)
        order = key_of(logit) >> shift
        take = (order > key) & (order >= floor) & (column < columns)
        weight += tl.where(take, _weight(logit, largest, inverse), 0)
    return tl.sum(weight, 0)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["slots", "positions", "tokens"])
def sample_whole_rows(
    logits, row_stride, columns, table, table_stride, slots, positions, tokens, last_token, counts, changed_stages,
    changed_logits, maxima, groups, undecided,
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
    temperature = tl.load(table + slot).to(tl.float32, bitcast=True)
    inverse = tl.div_rn(1.0, temperature)
    top_k = tl.load(table + _TOP_K * table_stride + slot)
    top_p = tl.load(table + _TOP_P * table_stride + slot).to(tl.float32, bitcast=True)
    min_p = tl.load(table + _MIN_P * table_stride + slot).to(tl.float32, bitcast=True)

    group = tl.arange(0, GROUPS)
    most = tl.load(maxima + row.to(tl.int64) * groups + group, group < groups, other=float("-inf"))
    largest = tl.max(most, 0)
    highest = key_of(largest) >> shift
    lowest = highest * 0 + (_LOWEST >> shift)

    floor = lowest
    limited = (top_k > 0) & (top_k < columns)
    if limited:
        low = lowest
        high = highest
        if top_k <= groups:
            # Every group has a column that reaches the smallest of their maxima.
            low = key_of(tl.min(tl.where(group < groups, most, largest), 0)) >> shift
        while low < high:
            middle = (low | high) - ((low ^ high) >> 1)
            if _count_from(logits, changed_logits, changed, columns, middle, shift, BLOCK) >= top_k:
                low = middle
            else:
                high = middle - 1
        floor = low

    if top_p < 1.0:
        total = _weight_above(
            logits, changed_logits, changed, columns, floor - 1, shift, floor, largest, inverse, BLOCK
        )  # fmt: skip
        target = tl.maximum(top_p.to(tl.float64) * total.to(tl.float64), 1.0)
        # Everything that has a weight is above this logit.
        low = tl.maximum(floor, key_of(largest - 22.0 * temperature) >> shift)
        high = highest
        while low < high:
            middle = middle_down(low, high)
            above = _weight_above(
                logits, changed_logits, changed, columns, middle, shift, floor, largest, inverse, BLOCK
            )  # fmt: skip
            if above.to(tl.float64) < target:
                high = middle
            else:
                low = middle + 1
        floor = low
    limit = _min_p_limit(largest, temperature, min_p)
    if floor > lowest:
        limit = tl.minimum(tl.maximum(limit, logit_of(floor << shift)), largest)

    first, second = row_keys(
        tl.load(table + _SEED_LOW * table_stride + slot), tl.load(table + _SEED_HIGH * table_stride + slot), position
    )
    score = largest * 0.0 + float("-inf")
    token = slot * 0 + 0x7FFFFFFF
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = logits_at(logits, changed_logits, changed, column, column < columns)
        best, where = _best(logit, column, (column < columns) & (logit >= limit), inverse, first, second)
        token = tl.where(best > score, where, token)
        score = tl.maximum(score, best)
    _store_token(token, row, slot, (stages & _PENALIZED) != 0, tokens, last_token, counts, columns)
