"""`resample` and log-probabilities on CUDA: four launches without host decisions, which a graph can capture."""

from __future__ import annotations

from typing import Final

import torch
import triton

from minisgl.kernels.launch.dependent_launch_triton import dependent_launch
from minisgl.kernels.sampling.filter_triton import sample_candidates, sample_whole_rows
from minisgl.kernels.sampling.logprobs_triton import report_logprobs
from minisgl.kernels.sampling.processor_tables import ProcessorTables
from minisgl.kernels.sampling.sampling_rows import MOST_TOPS, Samples, SamplingRows
from minisgl.kernels.sampling.scan_logits_triton import scan_logits

_GROUP: Final = 64
_GROUPS: Final = 32
"""Groups of columns that a program of the scan reads at a time."""
_WARPS: Final = 8
_ROW_WARPS: Final = 8
"""Warps of the programs that have a row each."""
_FEW_ROWS: Final = 32
_BLOCKS: Final = 4
"""Such blocks per program for many rows."""
_USUAL: Final = 128
"""Groups that are candidates without top-k."""
_CHOSEN: Final = 512
_FOUND: Final = 2048
_CHUNK: Final = 32
_SHIFTS: Final = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Low bits of a float32 that are zero in numbers of each dtype."""


class Workspace:
    """Memory for up to `rows` rows, which one step uses at a time."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        groups = triton.cdiv(vocab_size, _GROUP)
        self.groups = torch.empty((5, rows, groups), dtype=torch.float32, device=device)
        """Largest logits and sums of weights, by group of columns."""
        parts = triton.cdiv(groups, _GROUPS)
        self.scores = torch.empty((rows, parts), dtype=torch.float32, device=device)
        self.indices = torch.empty((rows, parts), dtype=torch.int32, device=device)
        self.changed_logits = torch.empty((rows, vocab_size), dtype=torch.float32, device=device)
        self.changed_stages = torch.empty(rows, dtype=torch.int32, device=device)
        self.chosen = torch.empty((rows, _CHOSEN), dtype=torch.int32, device=device)
        self.found = torch.empty((rows, _FOUND), dtype=torch.float32, device=device)
        self.found_at = torch.empty((rows, _FOUND), dtype=torch.int32, device=device)
        self.undecided = torch.zeros(rows, dtype=torch.int32, device=device)
        self.reports = torch.zeros((rows, 1 + 2 * MOST_TOPS), dtype=torch.int32, device=device)

    @staticmethod
    def num_bytes(rows: int, vocab_size: int) -> int:
        """Device memory of a workspace, rounded up."""
        return rows * (4 * vocab_size + 20 * -(-vocab_size // _GROUP) + 16 * _FOUND)


def resample_cuda(
    logits: torch.Tensor,
    rows: SamplingRows,
    samples: Samples,
    tables: ProcessorTables,
    workspace: Workspace,
    *,
    lists: bool,
) -> None:
    """See `resample`. Afterwards `report_cuda` may read the workspace."""
    count, columns = logits.shape
    assert logits.stride(1) == 1 and rows.table.is_contiguous() and tables.counts.shape[1] == columns
    maxima, sums, sums_above, raw_maxima, raw_sums = workspace.groups
    groups = maxima.shape[1]
    blocks = 1 if count <= _FEW_ROWS else _BLOCKS
    parts = triton.cdiv(groups, _GROUPS * blocks)
    table = rows.table, rows.table.stride(0), rows.slots, rows.positions, samples.tokens
    changed = workspace.changed_stages, workspace.changed_logits
    scan_logits[(parts, count)](
        logits, logits.stride(0), columns, *table, tables.counts, tables.lists_address, tables.bitmask,
        tables.bitmask.shape[1], *changed, maxima, sums, sums_above, raw_maxima, raw_sums, groups,
        workspace.scores, workspace.indices, LISTS=lists, GROUPS=_GROUPS, BLOCKS=blocks, num_warps=_WARPS,
    )  # fmt: skip
    early = dependent_launch(logits.device)
    block = triton.next_power_of_2(groups)
    shift = _SHIFTS[logits.dtype]
    sample_candidates[(count,)](
        logits, logits.stride(0), columns, *table, samples.last_token, tables.counts, *changed, maxima, sums,
        sums_above, groups, workspace.scores, workspace.indices, parts, workspace.chosen, workspace.found,
        workspace.found_at, workspace.undecided, SHIFT=shift, BLOCK=block, PARTS=triton.next_power_of_2(parts),
        CHOSEN=_CHOSEN, FOUND=_FOUND, USUAL=_USUAL, CHUNK=_CHUNK, num_warps=_ROW_WARPS, **early,
    )  # fmt: skip
    sample_whole_rows[(count,)](
        logits, logits.stride(0), columns, *table, samples.last_token, tables.counts, *changed, maxima, sums, groups,
        workspace.undecided, SHIFT=shift, GROUPS=block, BLOCK=4096, num_warps=16, **early,
    )  # fmt: skip


def report_cuda(logits: torch.Tensor, rows: SamplingRows, tokens: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """Log-probabilities of the raw `logits`, after `resample_cuda` with them: int32 [S, 1 + 2 MOST_TOPS], where rows
    that report nothing are undefined; the columns are those of `logprobs.report`."""
    count, columns = logits.shape
    _, _, _, raw_maxima, raw_sums = workspace.groups
    groups = raw_maxima.shape[1]
    reports = workspace.reports[:count]
    report_logprobs[(count,)](
        logits, logits.stride(0), columns, rows.table, rows.table.stride(0), rows.slots, tokens, raw_maxima, raw_sums,
        groups, workspace.chosen, workspace.found, workspace.found_at, reports, SHIFT=_SHIFTS[logits.dtype],
        BLOCK=triton.next_power_of_2(groups), CHOSEN=_CHOSEN, FOUND=_FOUND, CHUNK=_CHUNK, MOST=MOST_TOPS,
        num_warps=_ROW_WARPS, **dependent_launch(logits.device),
    )  # fmt: skip
    return reports
