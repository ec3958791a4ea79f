# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""`top_k_top_p_thresholds` on CUDA: bisection over the bits of the logits instead of a sort.

One program per row reads the row a few dozen times from the L2 cache; 16-bit logits need 16 rounds, float32 32.
"""

import torch
import triton
import triton.language as tl

from minisgl.kernels.sampling_rows import WEIGHT_UNIT, SamplingRows

_UNIT = tl.constexpr(WEIGHT_UNIT)
_SIGN = tl.constexpr(-(1 << 31))
_LOWEST = tl.constexpr(-0x7F800001)
"""Below the key of every finite number."""


@triton.jit
def _key(logit):
    """int32 in the order of the float32 `logit`; −0 and +0 are the same."""
    bits = logit.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, (bits & 0x7FFFFFFF) * -1, bits)


@triton.jit
def _from_key(key):
    return tl.where(key < 0, (key * -1) | _SIGN, key).to(tl.float32, bitcast=True)


@triton.jit
def _count_from(logits, columns, key, BLOCK: tl.constexpr):
    """Columns whose key is at least `key`."""
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + column, column < columns, other=float("-inf")).to(tl.float32)
        count += ((_key(logit) >= key) & (column < columns)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def _weight_above(logits, columns, key, floor, largest, inverse, BLOCK: tl.constexpr):
    """Weight of the columns whose key is above `key` and at least `floor`."""
    weight = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + column, column < columns, other=float("-inf")).to(tl.float32)
        order = _key(logit)
        part = tl.floor(tl.exp((logit - largest) * inverse) * _UNIT + 0.5).to(tl.int64)
        weight += tl.where((order > key) & (order >= floor) & (column < columns), part, 0)
    return tl.sum(weight, 0)


# The number of rows changes with every step: one compiled kernel for all.
@triton.jit(do_not_specialize=["parameter_stride"], do_not_specialize_on_alignment=["slots"])
def _top_k_top_p(logits, parameters, parameter_stride, slots, out, row_stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    parameters += tl.load(slots + row)
    temperature = tl.load(parameters).to(tl.float32, bitcast=True)
    top_k = tl.load(parameters + parameter_stride)
    top_p = tl.load(parameters + 2 * parameter_stride).to(tl.float32, bitcast=True)
    min_p = tl.load(parameters + 3 * parameter_stride).to(tl.float32, bitcast=True)
    inverse = tl.div_rn(1.0, temperature)

    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        most = tl.maximum(most, tl.load(logits + column, column < columns, other=float("-inf")).to(tl.float32))
    largest = tl.max(most, 0)
    highest = _key(largest)

    # Largest key that at least top_k columns reach: low always does, high + 1 never.
    floor = highest * 0 + _LOWEST
    if (top_k > 0) & (top_k < columns):
        low = floor.to(tl.int64)
        high = highest.to(tl.int64)
        while low < high:
            middle = (low + high + 1) >> 1
            if _count_from(logits, columns, middle.to(tl.int32), BLOCK) >= top_k:
                low = middle
            else:
                high = middle - 1
        floor = low.to(tl.int32)

    # Smallest key above which less than top_p of the weight lies: high always qualifies.
    if top_p < 1.0:
        total = _weight_above(logits, columns, floor - 1, floor, largest, inverse, BLOCK)
        target = tl.maximum(top_p.to(tl.float64) * total.to(tl.float64), 1.0)
        low = floor.to(tl.int64)
        high = highest.to(tl.int64)
        while low < high:
            middle = (low + high) >> 1
            above = _weight_above(logits, columns, middle.to(tl.int32), floor, largest, inverse, BLOCK)
            if above.to(tl.float64) < target:
                high = middle
            else:
                low = middle + 1
        floor = low.to(tl.int32)

    smallest = tl.where(floor == _LOWEST, float("-inf"), _from_key(floor))
    if min_p > 0.0:
        smallest = tl.maximum(smallest, largest + temperature * tl.log(min_p))
    tl.store(out + row, tl.minimum(smallest, largest))


def top_k_top_p_cuda(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    assert logits.stride(1) == 1 and rows.table.is_contiguous() and rows.slots.is_contiguous()
    out = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _top_k_top_p[(len(logits),)](
        logits, rows.table, rows.table.stride(0), rows.slots, out, logits.stride(0), logits.shape[1], BLOCK=4096,
        num_warps=16,
    )  # fmt: skip
    return out
