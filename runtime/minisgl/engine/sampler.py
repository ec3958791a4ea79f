"""Sampling: every rank has the logits of a shard of the vocabulary, and all ranks obtain the same tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.engine.logits_processors import DeviceLogitsProcessors
from minisgl.engine.logprobs import PROMPT_CHUNK, report
from minisgl.engine.process_logits import process_logits
from minisgl.engine.tables import Tables
from minisgl.kernels.sample import sample
from minisgl.kernels.top_k_top_p import top_k_top_p_thresholds


class Sampler:
    """Samples the tokens of a step on one rank, whose shard begins at vocabulary index `vocab_start`."""

    def __init__(self, tables: Tables, parallel: TensorParallel, vocab_start: int, vocab_size: int) -> None:
        self._tables = tables
        self._parallel = parallel
        self._vocab_start = vocab_start
        self._vocab_size = vocab_size

    def sample(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Sample tokens [S] int32 from this rank's `logits` [S, vocab_local], without top-k, top-p and min-p; −1 where
        the logits are not finite. A CUDA graph can capture it.

        Ranks exchange one (score, index) pair per row: random numbers belong to vocabulary indices, so the best of
        the ranks' best scores is the best of all.
        """
        values, indices = sample(logits, self._tables.sampling_rows(slots, positions), self._vocab_start)
        if self._parallel.size == 1:
            return indices
        all_values, all_indices = self._parallel.all_gather_pairs(values, indices)
        # argmax returns the first of equal values, which is that of the lowest rank and therefore the lowest index.
        return all_indices.gather(0, all_values.argmax(0, keepdim=True))[0].int()

    def sample_filtered(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        tokens: torch.Tensor,
        filtered_rows: torch.Tensor,
    ) -> None:
        """Overwrite `tokens` [S] in `filtered_rows` [F] with samples under top-k, top-p and min-p.

        Only the logits of these rows are gathered; then every rank computes the same.
        """
        rows = filtered_rows.long()
        full = self._whole(logits[rows])
        parameters = self._tables.sampling_rows(slots[rows], positions[rows])
        tokens[rows] = sample(full, parameters, 0, top_k_top_p_thresholds(full, parameters))[1]

    def sample_changed(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        tokens: torch.Tensor,
        processors: DeviceLogitsProcessors,
    ) -> None:
        """Overwrite `tokens` [S] in the rows with penalties, biases or masks, and count the tokens of the step."""
        changed = processors.changed.long()
        full = self._whole(logits[changed]).float()
        process_logits(full, processors, self._tables.counts)
        unfiltered = processors.unfiltered
        for part, filters in ((slice(unfiltered), False), (slice(unfiltered, None), True)):
            rows = changed[part]
            if len(rows):
                parameters = self._tables.sampling_rows(slots[rows], positions[rows])
                thresholds = top_k_top_p_thresholds(full[part], parameters) if filters else None
                tokens[rows] = sample(full[part], parameters, 0, thresholds)[1]
        self._tables.counts.add_sampled(processors, tokens)

    def report(self, logits: torch.Tensor, tokens: torch.Tensor, processors: DeviceLogitsProcessors) -> torch.Tensor:
        """Log-probabilities, as `logprobs.report`, of `tokens` [S] in the rows of `logits` [S, vocab_local] that
        report them."""
        rows = processors.logprob_rows.long()
        return report(self._whole(logits[rows]), tokens[rows], processors.tops)

    def report_prompt(
        self, head: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, processors: DeviceLogitsProcessors
    ) -> torch.Tensor:
        """The same for tokens of prompts: `head` returns the logits of rows of `hidden` [T, hidden]."""
        parts = zip(
            processors.prompt_rows.long().split(PROMPT_CHUNK), processors.prompt_next.split(PROMPT_CHUNK), strict=True
        )
        return torch.cat([report(self._whole(head(hidden[rows])), next_, processors.tops) for rows, next_ in parts])

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Gather [N, vocab_local] of each rank to [N, vocab] on all ranks."""
        return self._parallel.all_gather_last_dim(logits)[:, : self._vocab_size]
