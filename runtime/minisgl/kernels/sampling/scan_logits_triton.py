"""First pass over the logits of rows with filters, logits processors or log-probabilities: one read, divided over many
programs.

It applies biases, penalties and masks. A row without filters is sampled at once. Of other rows, the pass leaves the
largest logit of each group of 64 columns, and their sums of weights: enough to find the few groups that can have one
of the k largest logits. These numbers do not depend on how many programs share a row, nor on other rows.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from minisgl.kernels.sampling import sampling_rows as columns_of
from minisgl.kernels.sampling.random_bits_triton import gumbel_noise_log2, keys_from, row_keys

_TOP_K = tl.constexpr(columns_of.TOP_K)
_TOP_P = tl.constexpr(columns_of.TOP_P)
_SEED_LOW = tl.constexpr(columns_of.SEED_LOW)
_SEED_HIGH = tl.constexpr(columns_of.SEED_HIGH)
_STAGES = tl.constexpr(columns_of.STAGES)
_REPETITION = tl.constexpr(columns_of.REPETITION)
_FREQUENCY = tl.constexpr(columns_of.FREQUENCY)
_PRESENCE = tl.constexpr(columns_of.PRESENCE)
_MASK_UNTIL = tl.constexpr(columns_of.MASK_UNTIL)
_BIASES = tl.constexpr(columns_of.BIASES)
_MASKS = tl.constexpr(columns_of.MASKS)
_FILTERED = tl.constexpr(columns_of.FILTERED)
_PENALIZED = tl.constexpr(columns_of.PENALIZED)
_BIASED = tl.constexpr(columns_of.BIASED)
_MASKED = tl.constexpr(columns_of.MASKED)
_BITMASKED = tl.constexpr(columns_of.BITMASKED)
_REPORTED = tl.constexpr(columns_of.REPORTED)
_LOG_2 = tl.constexpr(0.6931471805599453)
_MASKED_LOGIT = tl.constexpr(-1e30)


@triton.jit
def _below(ids, count, column, LANES: tl.constexpr):
    """Number of the first `count` ascending `ids` that are below `column`."""
    lane = tl.arange(0, LANES)
    below = tl.zeros((LANES,), tl.int32)
    for first in range(0, count, LANES):
        at = first + lane
        below += ((at < count) & (tl.load(ids + at, at < count, other=0) < column)).to(tl.int32)
    return tl.sum(below, 0)


@triton.jit
def _penalized(logit, generated_twice, repetition, frequency, presence):
    """Logits after the penalties; products are rounded before they are subtracted, as torch does it."""
    repeated = tl.where(logit > 0, tl.div_rn(logit, repetition), libdevice.mul_rn(logit, repetition))
    logit = tl.where(generated_twice > 0, repeated, logit)
    # The shift drops the bit that says that the prompt has the token.
    generated = generated_twice >> 1
    logit -= libdevice.mul_rn(frequency, generated.to(tl.float32))
    return tl.where(generated > 0, logit - presence, logit)


# Slices of a step's inputs begin at any address: one compiled kernel for all.
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["slots", "positions", "tokens"])
def scan_logits(
    logits, row_stride, columns, table, table_stride, slots, positions, tokens, counts, lists, bitmask, bitmask_words,
    changed_stages, changed_logits, maxima, sums, sums_above, raw_maxima, raw_sums, groups, scores, indices,
    LISTS: tl.constexpr, GROUPS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """`changed_stages` [S]: bits of the stages that change a row's logits in this step, for rows with any stage.
    `LISTS`: apply biases, masks and bitmasks too; without them the kernel needs half of the registers."""
    part = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.load(slots + row)
    stages = tl.load(table + _STAGES * table_stride + slot)
    if stages == 0:
        return
    position = tl.load(positions + row)
    changes = stages & (_PENALIZED | _BIASED | _BITMASKED)
    if position < tl.load(table + _MASK_UNTIL * table_stride + slot):
        changes = changes | (stages & _MASKED)
    if part == 0:
        tl.store(changed_stages + row, changes)
    if (changes | (stages & (_FILTERED | _REPORTED))) == 0:
        return
    filtered = (stages & _FILTERED) != 0
    temperature = tl.load(table + slot).to(tl.float32, bitcast=True)
    inverse = tl.div_rn(1.0, temperature)
    top_k = tl.load(table + _TOP_K * table_stride + slot)
    top_p = tl.load(table + _TOP_P * table_stride + slot).to(tl.float32, bitcast=True)
    summed = filtered & (top_p < 1.0) & ((top_k <= 0) | (top_k >= columns))
    first, second = row_keys(
        tl.load(table + _SEED_LOW * table_stride + slot), tl.load(table + _SEED_HIGH * table_stride + slot), position
    )
    logits += row.to(tl.int64) * row_stride
    # The plain sample, which counts where it passes the filters.
    own = tl.load(logits + tl.maximum(tl.load(tokens + row), 0)).to(tl.float32)

    repetition = tl.load(table + _REPETITION * table_stride + slot).to(tl.float32, bitcast=True)
    frequency = tl.load(table + _FREQUENCY * table_stride + slot).to(tl.float32, bitcast=True)
    presence = tl.load(table + _PRESENCE * table_stride + slot).to(tl.float32, bitcast=True)
    biases = tl.load(table + _BIASES * table_stride + slot)
    masks = tl.load(table + _MASKS * table_stride + slot)
    capacity = tl.load(lists + 1)
    ids = tl.load(lists).to(tl.pointer_type(tl.int32)) + slot * 2 * capacity
    values = ids + capacity
    counts += slot.to(tl.int64) * columns
    bitmask += slot.to(tl.int64) * bitmask_words
    changed_logits += row.to(tl.int64) * columns
    row_groups = row.to(tl.int64) * groups

    lane = tl.arange(0, 64)
    best = tl.full((GROUPS, 64), float("-inf"), tl.float32)
    where = tl.zeros((GROUPS, 64), tl.int32)
    group = part * BLOCKS * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 64 + lane[None, :]
    following = tl.load(logits + column, column < columns, other=float("-inf"))
    for block in range(BLOCKS):
        group = (part * BLOCKS + block) * GROUPS + tl.arange(0, GROUPS)
        start = (part * BLOCKS + block) * GROUPS * 64
        column = group[:, None] * 64 + lane[None, :]
        inside = column < columns
        exists = group < groups
        out = row_groups + group
        logit = following.to(tl.float32)
        # The next logits are read while these are used.
        after = column + GROUPS * 64
        following = tl.load(logits + after, (after < columns) & (block + 1 < BLOCKS), other=float("-inf"))
        if (stages & _REPORTED) != 0:
            most = tl.max(logit, 1)
            tl.store(raw_maxima + out, most, exists)
            tl.store(raw_sums + out, tl.sum(tl.exp(logit - most[:, None]), 1), exists)
        # Under a bitmask, most blocks have no token that may be sampled.
        allows = True
        if changes != 0:
            if LISTS:
                end = tl.where((changes & _BIASED) != 0, _below(ids, biases, start + GROUPS * 64, 128), 0)
                for entry in range(_below(ids, biases, start, 128), end):
                    bias = tl.load(values + entry).to(tl.float32, bitcast=True)
                    logit = tl.where(column == tl.load(ids + entry), logit + bias, logit)
            if (changes & _PENALIZED) != 0:
                generated = tl.load(counts + column, inside, other=0).to(tl.int32)
                logit = _penalized(logit, generated, repetition, frequency, presence)
            if LISTS:
                if (changes & _MASKED) != 0:
                    masked = ids + biases
                    end = _below(masked, masks, start + GROUPS * 64, 128)
                    for entry in range(_below(masked, masks, start, 128), end):
                        logit = tl.where(column == tl.load(masked + entry), _MASKED_LOGIT, logit)
                if (changes & _BITMASKED) != 0:
                    word = tl.load(bitmask + column // 32, inside, other=0)
                    bit = (word >> (column % 32)) & 1
                    logit = tl.where(inside & (bit == 0), _MASKED_LOGIT, logit)
                    allows = tl.max(tl.max(bit, 1), 0) != 0
            if filtered:
                tl.store(changed_logits + column, logit, inside)
            elif allows:
                score = logit
                if temperature > 0.0:
                    noise = gumbel_noise_log2(keys_from(first, start), second, column - start)
                    score = logit * inverse - _LOG_2 * noise
                score = tl.where(inside, score, float("-inf"))
                # Each lane visits its columns in ascending order and keeps the first of equal scores.
                where = tl.where(score > best, column, where)
                best = tl.maximum(best, score)
        if filtered:
            most = tl.max(logit, 1)
            tl.store(maxima + out, most, exists)
            if summed:
                weight = tl.exp((logit - most[:, None]) * inverse)
                tl.store(sums + out, tl.sum(weight, 1), exists)
                tl.store(sums_above + out, tl.sum(tl.where(logit > own, weight, 0.0), 1), exists)
    if (changes != 0) & (filtered == 0):
        score = tl.max(tl.max(best, 1), 0)
        at = tl.min(tl.min(tl.where(best == score, where, 0x7FFFFFFF), 1), 0)
        place = row * tl.num_programs(0) + part
        tl.store(scores + place, score)
        tl.store(indices + place, at)
