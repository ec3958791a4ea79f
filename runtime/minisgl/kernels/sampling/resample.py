"""Sample again in rows for which the plain sample does not count: those with top-k, top-p, min-p or logits processors.

The engine samples all rows plainly first (`sample`), which is all that most rows need. On CUDA each launch has programs
for all rows, so that a graph can hold it; what a row needs is decided on the device, by its stages:

| rows | kernel | why |
|---|---|---|
| all | `sample_triton` | one pass over the logits of a rank's shard |
| with filters, processors or log-probabilities | `scan_logits` | one pass: processors, and maxima of 64 columns each |
| with filters or processors | `sample_candidates` | few groups of columns can pass: some hundred numbers decide |
| left undecided, as flat ones with top-p alone | `sample_whole_rows` | reads the whole row a few times |
| with log-probabilities | `report_logprobs` | from the groups of the scan |
"""

from __future__ import annotations

from typing import Any

import torch

from minisgl.kernels.sampling.processor_tables import ProcessorTables
from minisgl.kernels.sampling.sample import sample
from minisgl.kernels.sampling.sampling_rows import (
    BIASED,
    BIASES,
    BITMASKED,
    FILTERED,
    FREQUENCY,
    GENERATED,
    MASK_UNTIL,
    MASKED,
    MASKED_LOGIT,
    MASKS,
    MOST_GENERATED,
    PENALIZED,
    PRESENCE,
    REPETITION,
    STAGES,
    WEIGHT_UNIT,
    Samples,
    SamplingRows,
)


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


def top_k_top_p_thresholds(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Top-k, top-p and min-p in torch, as one threshold per row, float32 [S], for `logits` [S, V] over the whole
    vocabulary: the smallest logit that may be sampled, at most the largest one. `resample_triton` computes the same.

    The filters apply in the order of Hugging Face transformers (temperature, top-k, top-p, min-p), each to the result
    of the previous one. Tokens of equal logit are kept or removed together, so the result does not depend on a sort
    order. Probabilities are added as integers (weights in units of 2^-30 of the largest): the sum is the same in any
    order and on any rank.
    """
    ordered = logits.float().sort(1, descending=True).values
    largest = ordered[:, :1]
    vocabulary = ordered.shape[1]
    top_k = torch.where(rows.top_k > 0, rows.top_k, vocabulary).clamp(max=vocabulary).long()
    smallest = ordered.gather(1, top_k[:, None] - 1)
    temperature = rows.temperature[:, None]

    weights = (torch.exp((ordered - largest) * (1.0 / temperature)) * WEIGHT_UNIT).round().long()
    weights.masked_fill_(ordered < smallest, 0)
    sums = weights.cumsum(1)
    # A token is kept while the tokens above it weigh less than top_p of all; the first one always is.
    target = (rows.top_p.double() * sums[:, -1].double()).clamp(min=1.0)
    target = target.masked_fill(rows.top_p >= 1, torch.inf)
    kept = ((sums - weights).double() < target[:, None]) & (ordered >= smallest)
    smallest = ordered.gather(1, (kept.sum(1, keepdim=True) - 1).clamp(min=0))

    # log(0) is −inf: no limit.
    smallest = torch.maximum(smallest, largest + temperature * rows.min_p[:, None].log())
    return torch.minimum(smallest, largest)[:, 0]


def changing_rows(rows: SamplingRows) -> torch.Tensor:
    """[S] bits of the stages that change the logits of each row in this step."""
    stages = rows.column(STAGES)
    changes = stages & (PENALIZED | BIASED | BITMASKED)
    return changes | (stages & MASKED) * (rows.positions < rows.column(MASK_UNTIL))


def process_logits(logits: torch.Tensor, rows: SamplingRows, tables: ProcessorTables) -> torch.Tensor:
    """float32 logits [S, vocab] after the processors of each row, in vLLM's order: biases, then the penalties for
    repetition, frequency and presence. Masks come last, where no penalty can undo them."""
    logits = logits.float().clone()
    changes = changing_rows(rows)
    biases = torch.where(changes & BIASED > 0, rows.column(BIASES), 0)
    lists = tables.lists[rows.slots]
    lane = torch.arange(lists.shape[2], device=logits.device)
    row, entry = (lane < biases[:, None]).nonzero().T
    place = row, lists[row, 0, entry].long()
    logits.index_put_(place, logits[place] + lists[row, 1, entry].view(torch.float32))

    penalized = (changes & PENALIZED > 0).nonzero()[:, 0]
    logits[penalized] = _penalized(logits[penalized], rows[penalized], tables.counts)

    first = rows.column(BIASES)
    end = first + torch.where(changes & MASKED > 0, rows.column(MASKS), 0)
    row, entry = ((lane >= first[:, None]) & (lane < end[:, None])).nonzero().T
    logits[row, lists[row, 0, entry].long()] = MASKED_LOGIT

    masked = (changes & BITMASKED > 0).nonzero()[:, 0]
    words = tables.bitmask[rows.slots[masked]]
    column = torch.arange(logits.shape[1], device=logits.device)
    allowed = (words[:, column // 32] >> (column % 32).int()) & 1
    logits[masked] = logits[masked].masked_fill(allowed == 0, MASKED_LOGIT)
    return logits


def _penalized(logits: torch.Tensor, rows: SamplingRows, table: torch.Tensor) -> torch.Tensor:
    counts = table[rows.slots].int()
    repetition, frequency, presence = (rows.floats(column)[:, None] for column in (REPETITION, FREQUENCY, PRESENCE))
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(counts > 0, repeated, logits)
    # The shift drops the bit that says that the prompt has the token.
    generated = counts >> 1
    logits = logits - frequency * generated
    return logits - presence * (generated > 0)
