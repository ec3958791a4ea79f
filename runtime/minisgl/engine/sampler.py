"""From logits to tokens: every rank holds a shard of the vocabulary and all of them settle on the same tokens."""

from __future__ import annotations

import torch

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.engine.tables import Tables
from minisgl.kernels.choice import choose
from minisgl.kernels.thresholds import thresholds


class Sampler:
    def __init__(self, tables: Tables, parallel: TensorParallel, vocab_start: int, vocab_size: int) -> None:
        self._tables = tables
        self._parallel = parallel
        self._vocab_start = vocab_start
        self._vocab_size = vocab_size

    def sample(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Tokens [S] int32 for this rank's `logits` [S, vocab_local], without top-k, top-p or min-p; −1 where the
        logits are not finite. Capturable in a CUDA graph.

        Ranks exchange one (score, index) pair a row: random numbers belong to vocabulary indices, so the best of the
        ranks' bests is the best of all.
        """
        values, indices = choose(logits, self._tables.sampling_rows(slots, positions), self._vocab_start)
        if self._parallel.size == 1:
            return indices
        all_values, all_indices = self._parallel.all_gather_pairs(values, indices)
        # The first of equal values is the lowest rank's, whose indices are lower.
        return all_indices.gather(0, all_values.argmax(0, keepdim=True))[0].int()

    def sample_filtered(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        tokens: torch.Tensor,
        filtered_rows: torch.Tensor,
    ) -> None:
        """Overwrite `tokens` [S] in `filtered_rows` [F] with samples of rows that have top-k, top-p or min-p.

        Only these rows' logits are gathered; then every rank computes the same.
        """
        picked = filtered_rows.long()
        full = self._parallel.all_gather_last_dim(logits[picked])[:, : self._vocab_size]
        rows = self._tables.sampling_rows(slots[picked], positions[picked])
        _, indices = choose(full, rows, 0, thresholds(full, rows))
        tokens[picked] = indices
