"""From logits to tokens: every rank holds a shard of the vocabulary and all of them settle on the same tokens."""

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
        values, indices = sample(logits, self._tables.sampling_rows(slots, positions), self._vocab_start)
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
        full = self._whole(logits[picked])
        rows = self._tables.sampling_rows(slots[picked], positions[picked])
        _, indices = sample(full, rows, 0, top_k_top_p_thresholds(full, rows))
        tokens[picked] = indices

    def sample_changed(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        tokens: torch.Tensor,
        processors: DeviceLogitsProcessors,
        unfiltered: int,
    ) -> None:
        """Overwrite `tokens` [S] in the rows with penalties, biases or masks, and count the tokens of the step.
        The first `unfiltered` of these rows have neither top-k, top-p nor min-p."""
        picked = processors.changed.long()
        full = self._whole(logits[picked]).float()
        process_logits(full, processors, self._tables.counts)
        for part, filters in ((slice(unfiltered), False), (slice(unfiltered, None), True)):
            rows = picked[part]
            if len(rows):
                parameters = self._tables.sampling_rows(slots[rows], positions[rows])
                limits = top_k_top_p_thresholds(full[part], parameters) if filters else None
                tokens[rows] = sample(full[part], parameters, 0, limits)[1]
        self._tables.counts.add_sampled(processors, tokens)

    def report(self, logits: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, tops: int) -> torch.Tensor:
        """Log-probabilities, as `logprobs.report`, of `tokens` [S] in `rows` of `logits` [S, vocab_local]."""
        picked = rows.long()
        return report(self._whole(logits[picked]), tokens[picked], tops)

    def report_prompt(
        self,
        head: Callable[[torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        processors: DeviceLogitsProcessors,
        tops: int,
    ) -> torch.Tensor:
        """The same for the prompts' tokens: `head` gives the logits of rows of `hidden` [T, hidden]."""
        parts = []
        for rows, following in zip(
            processors.prompt_rows.long().split(PROMPT_CHUNK), processors.prompt_next.split(PROMPT_CHUNK), strict=True
        ):
            parts.append(report(self._whole(head(hidden[rows])), following, tops))
        return torch.cat(parts)

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        """[N, vocab_local] on each rank to [N, vocab] on all."""
        return self._parallel.all_gather_last_dim(logits)[:, : self._vocab_size]
