"""Rows with filters, logits processors and log-probabilities, and what the torch version makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from minisgl.kernels.sampling import sampling_rows as columns
from minisgl.kernels.sampling.processor_tables import ProcessorTables
from minisgl.kernels.sampling.resample import resample
from minisgl.kernels.sampling.sample import sample
from minisgl.kernels.sampling.sampling_rows import Samples, SamplingRows

EDGE = 1e-6
"""Relative error of a sum of probabilities that may move a token across the edge of top-p."""


@dataclass(frozen=True)
class Row:
    """Parameters of one row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    biases: Mapping[int, float] = field(default_factory=dict)
    masked: Sequence[int] = ()
    mask_until: int = 0
    allowed: Sequence[int] | None = None
    tops: int = -1

    @property
    def listed(self) -> bool:
        return bool(self.biases) or bool(self.masked) or self.allowed is not None

    def stages(self) -> int:
        filtered = self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
        penalized = self.repetition != 1 or self.frequency != 0 or self.presence != 0
        bits = (
            (columns.FILTERED, filtered),
            (columns.PENALIZED, penalized),
            (columns.BIASED, bool(self.biases)),
            (columns.MASKED, bool(self.masked)),
            (columns.BITMASKED, self.allowed is not None),
            (columns.REPORTED, self.tops >= 0),
        )
        return sum(bit for bit, needed in bits if needed)


@dataclass(frozen=True)
class Batch:
    """Rows with their tables, after the plain sample."""

    logits: torch.Tensor
    rows: SamplingRows
    tables: ProcessorTables
    samples: Samples

    def resampled(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, next inputs and token counts by the torch version."""
        resample(self.logits, self.rows, self.samples, self.tables, None, lists=True)
        return self.samples.tokens, self.samples.last_token, self.tables.counts


def make_batch(
    logits: torch.Tensor, given: Sequence[Row], device: str = "cpu", positions: Sequence[int] | None = None
) -> Batch:
    """A batch on `device`, with slots in reverse order. Row i has seed 7 i; default positions are 3 i."""
    count, vocabulary = logits.shape
    tables = ProcessorTables(count + 1, vocabulary, torch.device("cpu"))
    table = np.zeros((columns.COLUMNS, count + 1), np.int32)
    floats = table.view(np.float32)
    slots = np.arange(count, 0, -1, dtype=np.int32)
    for number, (row, slot) in enumerate(zip(given, slots.tolist(), strict=True)):
        floats[columns.TEMPERATURE, slot] = row.temperature
        table[columns.TOP_K, slot] = row.top_k
        floats[columns.TOP_P, slot] = row.top_p
        floats[columns.MIN_P, slot] = row.min_p
        table[columns.SEED_LOW, slot] = 7 * number
        table[columns.STAGES, slot] = row.stages()
        floats[columns.REPETITION, slot] = row.repetition
        floats[columns.FREQUENCY, slot] = row.frequency
        floats[columns.PRESENCE, slot] = row.presence
        table[columns.MASK_UNTIL, slot] = row.mask_until
        table[columns.BIASES, slot] = len(row.biases)
        table[columns.MASKS, slot] = len(row.masked)
        table[columns.TOPS, slot] = row.tops
        _fill(tables, slot, row)
    placed = ProcessorTables(count + 1, vocabulary, torch.device(device))
    placed.reserve(tables.lists.shape[2])
    placed.lists.copy_(tables.lists)
    placed.counts.copy_(tables.counts)
    placed.bitmask.copy_(tables.bitmask)
    at = torch.tensor(list(positions) if positions is not None else [3 * i for i in range(count)], dtype=torch.int32)
    rows = SamplingRows(torch.from_numpy(table).to(device), torch.from_numpy(slots).to(device), at.to(device))
    logits = logits.to(device)
    tokens = sample(logits, rows, 0)[1]
    last_token = torch.full((count + 1,), -7, dtype=torch.int32, device=device)
    last_token[rows.slots.long()] = tokens.clamp(min=0)
    return Batch(logits, rows, placed, Samples(tokens, last_token))


def _fill(tables: ProcessorTables, slot: int, row: Row) -> None:
    biases = dict(sorted(row.biases.items()))
    ids, values = [*biases, *sorted(row.masked)], [*biases.values(), *[0.0] * len(row.masked)]
    tables.reserve(len(ids))
    tables.lists[slot, 0, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    tables.lists[slot, 1, : len(ids)] = torch.tensor(values, dtype=torch.float32).view(torch.int32)
    for token in row.output:
        tables.counts[slot, token] += columns.GENERATED
    tables.counts[slot, list(set(row.prompt))] += columns.IN_PROMPT
    if row.allowed is not None:
        words = np.zeros(tables.bitmask.shape[1] * 32, np.uint8)
        words[list(row.allowed)] = 1
        tables.bitmask[slot] = torch.from_numpy(np.packbits(words, bitorder="little").view(np.int32).copy())


def expected_tokens(
    logits: torch.Tensor, given: Sequence[Row], positions: Sequence[int] | None = None
) -> list[set[int]]:
    """Tokens that each row may have: one, or two where a sum within `EDGE` of top-p decides."""
    allowed: list[set[int]] = [set() for _ in given]
    for factor in (1 - EDGE, 1.0, 1 + EDGE) if any(row.top_p < 1 for row in given) else (1.0,):
        rows = [replace(row, top_p=min(1.0, row.top_p * factor)) if row.top_p < 1 else row for row in given]
        for row, token in enumerate(make_batch(logits, rows, positions=positions).resampled()[0].tolist()):
            allowed[row].add(token)
    return allowed


def flat(count: int, vocabulary: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Logits of a model with random weights."""
    return (torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def peaked(count: int, vocabulary: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Logits of a trained model: few tokens have nearly all of the probability."""
    logits = flat(count, vocabulary, torch.float32, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    likely = torch.randint(0, vocabulary, (count, 60), generator=generator)
    lift = 22 - torch.arange(60) * 0.2 + torch.randn(count, 60, generator=generator)
    return logits.scatter(1, likely, lift).to(dtype)
