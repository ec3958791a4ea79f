"""Logits as integers in the same order, for searches by bisection."""

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
