"""The few columns of a row that can have one of its largest logits.

A bound that k groups of columns reach is reached by at least k columns, so no column below it is among the k largest.
"""

import triton
import triton.language as tl

from minisgl.kernels.sampling.logit_keys_triton import key_of


@triton.jit
def logits_at(logits, changed_logits, changed, column, mask):
    """float32 logits of `column`: from `changed_logits` if `changed`, else from `logits`; −inf outside of `mask`."""
    if changed:
        logit = tl.load(changed_logits + column, mask, other=float("-inf"))
    else:
        logit = tl.load(logits + column, mask, other=float("-inf")).to(tl.float32)
    return logit


@triton.jit
def select_groups(keys, groups, low, chosen, count, capacity, EQUAL: tl.constexpr, BLOCK: tl.constexpr):
    """Append to `chosen` the numbers of the groups whose key is above `low`, or equal to it. Returns the number of
    groups in the list, which may exceed its `capacity`: the last ones are not stored."""
    group = tl.arange(0, BLOCK)
    take = (keys == low if EQUAL else keys > low) & (group < groups)
    place = count + tl.cumsum(take.to(tl.int32), 0) - 1
    tl.store(chosen + place, group, take & (place < capacity))
    return count + tl.sum(take.to(tl.int32), 0)


@triton.jit
def gather_candidates(
    logits, changed_logits, changed, columns, chosen, selected, low, shift, found, found_at, count, capacity,
    EQUAL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Append to `found` and `found_at` the logits and columns of the `selected` groups that are `chosen`, where the key
    is above `low`, or equal to it. Returns the number in the list, which may exceed its `capacity`."""
    lane = tl.arange(0, CHUNK * 64)
    count += selected * 0
    for first in range(0, selected, CHUNK):
        number = first + lane // 64
        column = tl.load(chosen + number, number < selected, other=0) * 64 + lane % 64
        valid = (number < selected) & (column < columns)
        logit = logits_at(logits, changed_logits, changed, column, valid)
        key = key_of(logit) >> shift
        take = (key == low if EQUAL else key > low) & valid
        place = count + tl.cumsum(take.to(tl.int32), 0) - 1
        keep = take & (place < capacity)
        tl.store(found + place, logit, keep)
        tl.store(found_at + place, column, keep)
        count += tl.sum(take.to(tl.int32), 0)
    return count
