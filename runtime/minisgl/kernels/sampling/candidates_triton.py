"""The few columns of a row that can have one of its largest logits.

A bound that k groups of columns reach is reached by at least k columns, so no column below it is among the k largest.
Searches by bisection take logits as integers in the same order.
"""

import triton
import triton.language as tl


@triton.jit
def key_of(logit):
    """int32 in the order of the float32 `logit`; −0 and +0 are the same. The low bits of a 16-bit logit are zero."""
    bits = logit.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, (bits & 0x7FFFFFFF) * -1, bits)


@triton.jit
def logit_of(key):
    """float32 logit of a key."""
    return tl.where(key < 0, (key * -1) | -2147483648, key).to(tl.float32, bitcast=True)


@triton.jit
def middle_up(low, high):
    """Mean of two int32 numbers, rounded up, without overflow."""
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def middle_down(low, high):
    """Mean of two int32 numbers, rounded down, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def kth_largest(keys, count, low, high, slack):
    """Largest number from `low` to `high` that at least `count` of the `keys` reach; `low` must be such a number.

    With `slack`, any number that at least `count` and at most `count + slack` of them reach.
    """
    while low < high:
        middle = middle_up(low, high)
        reached = tl.sum((keys >= middle).to(tl.int32), 0)
        if reached >= count:
            low = middle
            if reached <= count + slack:
                high = middle
        else:
            high = middle - 1
    return low


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
