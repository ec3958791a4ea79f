"""`sample` on CUDA: one read of the logits, whatever their dtype, and no temporary of their size."""

import math

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch.dependent_launch_triton import dependent_launch, start_next, wait_for_previous
from minisgl.kernels.sampling.random_bits_triton import gumbel_noise_log2, keys_from, row_keys
from minisgl.kernels.sampling.sampling_rows import SamplingRows

_PART = 8192
_SMALL_PART = 1024
_FEW_ROWS = 8
"""Columns per program: small parts for few rows, so that even one row of 152k columns has 149 programs."""

_LOG_2 = tl.constexpr(math.log(2))


@triton.jit
def _first_best(score, index):
    """Best score and the lowest index that has it."""
    best = tl.max(score, 0)
    return best, tl.min(tl.where(score == best, index, 0x7FFFFFFF), 0)


# Slices of a step's inputs begin at any address, and sizes change with every step: one compiled kernel for all.
@triton.jit(
    do_not_specialize=["parameter_stride", "first_index"], do_not_specialize_on_alignment=["slots", "positions"]
)
def _sample_part(
    logits, parameters, parameter_stride, slots, positions, scores, indices, row_stride, columns, first_index,
    PART: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(1)
    part = tl.program_id(0)
    slot = tl.load(slots + row)
    temperature = tl.load(parameters + slot).to(tl.float32, bitcast=True)
    first, second = row_keys(
        tl.load(parameters + 4 * parameter_stride + slot),
        tl.load(parameters + 5 * parameter_stride + slot),
        tl.load(positions + row),
    )
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    faults = tl.zeros((BLOCK,), tl.float32)
    for start in range(part * PART, part * PART + PART, BLOCK):
        column = start + lane
        mask = column < columns
        logit = tl.load(logits + row.to(tl.int64) * row_stride + column, mask, other=0.0).to(tl.float32)
        # NaN and infinity times zero are NaN, which stays in a sum.
        faults += logit * 0.0
        score = logit
        if temperature > 0.0:
            # Terms that depend on the lane alone are computed once, outside of the loop.
            noise = gumbel_noise_log2(keys_from(first, first_index + start), second, lane)
            score = logit * tl.div_rn(1.0, temperature) - _LOG_2 * noise
        score = tl.where(mask, score, float("-inf"))
        # Each lane visits its columns in ascending order and keeps the first of equal scores.
        where = tl.where(score > best, column, where)
        best = tl.maximum(best, score)
    score, index = _first_best(best, where)
    bad = tl.sum(faults, 0) != 0.0
    out = row * tl.num_programs(0) + part
    tl.store(scores + out, tl.where(bad, float("inf"), score))
    tl.store(indices + out, tl.where(bad, -1, index + first_index))


@triton.jit
def _sample_row(scores, indices, best_scores, best_indices, parts, PARTS: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    score = tl.load(scores + row * parts + part, part < parts, other=float("-inf"))
    index = tl.load(indices + row * parts + part, part < parts, other=0x7FFFFFFF)
    best, first = _first_best(score, index)
    tl.store(best_scores + row, best)
    tl.store(best_indices + row, first)


def sample_cuda(logits: torch.Tensor, rows: SamplingRows, first_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    count, columns = logits.shape
    assert logits.stride(1) == 1 and rows.table.is_contiguous()
    assert rows.slots.is_contiguous() and rows.positions.is_contiguous()
    width = _SMALL_PART if count <= _FEW_ROWS else _PART
    parts = triton.cdiv(columns, width)
    scores = torch.empty((count, parts), dtype=torch.float32, device=logits.device)
    indices = torch.empty((count, parts), dtype=torch.int32, device=logits.device)
    best_scores = torch.empty(count, dtype=torch.float32, device=logits.device)
    best_indices = torch.empty(count, dtype=torch.int32, device=logits.device)
    early = dependent_launch(logits.device)
    _sample_part[(parts, count)](
        logits, rows.table, rows.table.stride(0), rows.slots, rows.positions, scores, indices, logits.stride(0),
        columns, first_index, PART=width, BLOCK=min(width, 2048), num_warps=4 if width == _SMALL_PART else 8, **early,
    )  # fmt: skip
    _sample_row[(count,)](
        scores, indices, best_scores, best_indices, parts, PARTS=triton.next_power_of_2(parts), num_warps=1, **early
    )
    return best_scores, best_indices
