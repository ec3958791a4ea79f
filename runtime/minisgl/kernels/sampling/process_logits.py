"""Logits processors in torch: biases, penalties and masks, as `scan_logits` applies them on a GPU."""

from __future__ import annotations

import torch

from minisgl.kernels.sampling.processor_tables import ProcessorTables
from minisgl.kernels.sampling.sampling_rows import (
    BIASED,
    BIASES,
    BITMASKED,
    FREQUENCY,
    MASK_UNTIL,
    MASKED,
    MASKED_LOGIT,
    MASKS,
    PENALIZED,
    PRESENCE,
    REPETITION,
    STAGES,
    SamplingRows,
)


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
