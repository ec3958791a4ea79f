"""Sampling: every rank has the logits of a shard of the vocabulary, and all ranks obtain the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.engine.batch import DeviceStep
from minisgl.engine.logits_processors import MANY_TOPS, DeviceChanges, StepProcessors
from minisgl.engine.tables import Tables
from minisgl.kernels.sampling.processor_tables import ProcessorTables
from minisgl.kernels.sampling.resample import resample
from minisgl.kernels.sampling.sample import sample
from minisgl.kernels.sampling.sampling_rows import Samples


def sampling_bytes(rows: int, vocab_size: int, ranks: int, itemsize: int) -> int:
    """Device memory for sampling: the tables of filters and logits processors, the workspace, and temporaries of a step
    whose `rows` need all of it. `itemsize`: bytes of a logit."""
    from minisgl.kernels.sampling.resample_triton import Workspace

    tables = ProcessorTables.num_bytes(rows + 1, vocab_size) + Workspace.num_bytes(rows, vocab_size)
    uploaded_masks = 4 * rows * -(-vocab_size // 32)
    # Log-probabilities in torch: float32 logits and two temporaries of their size.
    torch_report = 3 * 4 * PROMPT_CHUNK * vocab_size
    # Logits of all ranks: those of this one, gathered, and in the order of the vocabulary.
    gathered = 3 * rows * vocab_size * itemsize if ranks > 1 else 0
    return tables + uploaded_masks + torch_report + gathered


class Sampler:
    """Samples the tokens of a step on one rank, whose shard begins at vocabulary index `vocab_start`."""

    def __init__(self, tables: Tables, parallel: TensorParallel, vocab_start: int, vocab_size: int) -> None:
        self._tables = tables
        self._parallel = parallel
        self._vocab_start = vocab_start
        self._vocab_size = vocab_size
        self._workspace = tables.workspace()

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

    def resample(
        self, logits: torch.Tensor, step: DeviceStep, tokens: torch.Tensor, processors: StepProcessors
    ) -> torch.Tensor | None:
        """Replace `tokens` [S] of rows with filters or logits processors, also as inputs of the next step. Returns the
        log-probabilities of the step if any row reports them: as `logprobs.report`, with a line for each of the S rows.

        With several ranks, only the logits of these rows are gathered; then every rank computes the same, but for late
        rows, whose masks only rank 0 has: its tokens count on all ranks.
        """
        slots, positions = step.sample_slots, step.sample_positions
        if self._parallel.size == 1:
            report_ = self.resample_all(logits, slots, positions, tokens, lists=processors.lists)
        else:
            rows = step.processed_rows.long()
            some = tokens[rows]
            gathered = self._whole(logits[rows])
            report_ = self.resample_all(gathered, slots[rows], positions[rows], some, lists=processors.lists)
            if len(processors.late_slots):
                # Counts of penalized tokens stay different: other ranks use them for these rows only.
                some = self._parallel.from_rank0(some)
                self._tables.set_last_tokens(slots[rows], some)
            tokens.index_copy_(0, rows, some)
            if report_ is not None:
                report_ = report_.new_zeros(len(tokens), report_.shape[1]).index_copy_(0, rows, report_)
        if not len(processors.reported):
            return None
        if report_ is None or processors.stages & MANY_TOPS:
            named = step.reported_ids.view(-1, processors.tops) if len(step.reported_ids) else None
            return self._report(logits, step.reported_rows.long(), tokens, processors.tops, named)
        return report_

    def resample_all(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, *, lists: bool
    ) -> torch.Tensor | None:
        """The same for `logits` [S, ≥ vocab] of the whole vocabulary; a CUDA graph can capture it. Returns
        log-probabilities with MOST_TOPS most likely tokens on CUDA, None on a CPU. `lists`: some row may have biases or
        masks."""
        logits = logits[:, : self._vocab_size]
        rows = self._tables.sampling_rows(slots, positions)
        samples = Samples(tokens, self._tables.last_token)
        resample(logits, rows, samples, self._tables.device_processors, self._workspace, lists=lists)
        if self._workspace is None:
            return None
        from minisgl.kernels.sampling.resample_triton import report_cuda

        return report_cuda(logits, rows, tokens, self._workspace)

    def _report(
        self, logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, tops: int, named: torch.Tensor | None
    ) -> torch.Tensor:
        """`rows` [N] of the S rows report; see `logprobs.report` for `tops` and `named` [N, tops]."""
        chunks = rows.split(PROMPT_CHUNK)
        ids = [None] * len(chunks) if named is None else named.split(PROMPT_CHUNK)
        parts = [
            report(self._whole(logits[chunk]), tokens[chunk], tops, some)
            for chunk, some in zip(chunks, ids, strict=True)
        ]
        return parts[0].new_zeros(len(tokens), parts[0].shape[1]).index_copy_(0, rows, torch.cat(parts))

    def report_prompt(
        self, head: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, changes: DeviceChanges
    ) -> torch.Tensor:
        """Log-probabilities of tokens of prompts: `head` returns the logits of rows of `hidden` [T, hidden]."""
        rows, tokens = changes.prompt_rows.long().split(PROMPT_CHUNK), changes.prompt_next.split(PROMPT_CHUNK)
        parts = zip(rows, tokens, strict=True)
        return torch.cat([report(self._whole(head(hidden[row])), next_, changes.prompt_tops) for row, next_ in parts])

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Gather [N, vocab_local] of each rank to [N, vocab] on all ranks."""
        return self._parallel.all_gather_last_dim(logits)[:, : self._vocab_size]


PROMPT_CHUNK: Final = 64
"""Number of positions whose float32 logits are in memory at a time."""


def report(logits: torch.Tensor, chosen: torch.Tensor, tops: int, named: torch.Tensor | None = None) -> torch.Tensor:
    """Report log-probabilities of the raw distribution, before temperature, penalties and bias, as int32 [N, 1 + 2 K]:
    log-probability of the sampled token (float bits), ids of the K = min(`tops`, vocab) most likely tokens, and their
    log-probabilities (float bits), best first.

    `logits` [N, vocab] cover the whole vocabulary; `chosen` [N] are the sampled token ids, where −1 counts as token 0.
    `named` [N, ≥ K]: tokens to report in place of the most likely ones; −1: none.
    """
    logits = logits.float()
    total = logits.logsumexp(1, keepdim=True)
    values, ids = logits.topk(min(tops, logits.shape[1]), 1)
    if named is not None:
        ids = torch.where(named[:, : ids.shape[1]] < 0, ids, named[:, : ids.shape[1]].long())
        values = logits.gather(1, ids)
    own = logits.gather(1, chosen.long().clamp(min=0)[:, None])
    return torch.cat(((own - total).view(torch.int32), ids.int(), (values - total).view(torch.int32)), 1)
