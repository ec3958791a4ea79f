"""Sample again in rows for which the plain sample does not count: those with top-k, top-p, min-p or logits processors.

The engine samples all rows plainly first (`sample`), which is all that most rows need.
"""

from __future__ import annotations

from typing import Any

import torch

from minisgl.kernels.sampling.process_logits import changing_rows, process_logits
from minisgl.kernels.sampling.processor_tables import ProcessorTables
from minisgl.kernels.sampling.sample import sample
from minisgl.kernels.sampling.sampling_rows import (
    FILTERED,
    GENERATED,
    MOST_GENERATED,
    PENALIZED,
    STAGES,
    Samples,
    SamplingRows,
)
from minisgl.kernels.sampling.top_k_top_p import top_k_top_p_thresholds


def resample(
    logits: torch.Tensor,
    rows: SamplingRows,
    samples: Samples,
    tables: ProcessorTables,
    workspace: Any,
    *,
    lists: bool,
) -> None:
    """Replace the samples of rows with filters or processors, and count the tokens of rows with penalties.

    `logits` [S, vocab] of any float dtype stay as they are. `workspace`: a `resample_triton.Workspace` on CUDA.
    `lists`: some row may have biases, masks or a bitmask. Rows without filters and processors keep their tokens.
    """
    if logits.is_cuda:
        from minisgl.kernels.sampling.resample_triton import resample_cuda

        resample_cuda(logits, rows, samples, tables, workspace, lists=lists)
        return
    stages, changes = rows.column(STAGES), changing_rows(rows)
    chosen = (((stages & FILTERED) | changes) > 0).logical_and(samples.tokens >= 0).nonzero()[:, 0]
    if not len(chosen):
        return
    some = rows[chosen]
    processed = process_logits(logits[chosen], some, tables)
    filtered = (stages[chosen] & FILTERED > 0).nonzero()[:, 0]
    limits = processed.new_full((len(chosen),), -torch.inf)
    limits[filtered] = top_k_top_p_thresholds(processed[filtered], some[filtered])
    tokens = sample(processed, some, 0, limits)[1]
    samples.tokens[chosen] = tokens
    samples.last_token[some.slots] = tokens
    penalized = (stages[chosen] & PENALIZED > 0).nonzero()[:, 0]
    place = some.slots[penalized].long(), tokens[penalized].long()
    counts = tables.counts[place]
    tables.counts[place] = torch.where(counts < GENERATED * MOST_GENERATED, counts + GENERATED, counts)
