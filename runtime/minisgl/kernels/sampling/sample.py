"""Sample one token per row of logits: greedy, or by the Gumbel-max trick (argmax of logits / T + Gumbel noise is
a draw from softmax(logits / T))."""

from __future__ import annotations

import torch

from minisgl.kernels.sampling.random_bits import gumbel_noise, random_bits, row_keys
from minisgl.kernels.sampling.sampling_rows import SamplingRows

_CHUNK_ELEMENTS = 1 << 22


def sample(
    logits: torch.Tensor, rows: SamplingRows, first_index: int, thresholds: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Best score and its vocabulary index per row, float32 [S] and int32 [S].

    `logits` [S, V] are those of the vocabulary from `first_index` on; with `thresholds` [S] float32 (on a CPU),
    only tokens whose logit is not below it can be sampled. Of equal scores the lowest index wins. A row whose logits
    are not all finite gets (+inf, −1), so that the maximum over ranks keeps the fault.
    """
    if logits.is_cuda:
        from minisgl.kernels.sampling.sample_triton import sample_cuda

        assert thresholds is None, "`resample` filters on a GPU"
        return sample_cuda(logits, rows, first_index)
    values = torch.empty(len(logits), dtype=torch.float32)
    indices = torch.empty(len(logits), dtype=torch.int32)
    chunk = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    for first in range(0, len(logits), chunk):
        part = slice(first, first + chunk)
        limits = None if thresholds is None else thresholds[part]
        values[part], indices[part] = _sample_rows(logits[part].float(), rows[part], first_index, limits)
    return values, indices


def _sample_rows(
    logits: torch.Tensor, rows: SamplingRows, first_index: int, thresholds: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    finite = logits.isfinite().all(1)
    scores = logits
    drawn = (rows.temperature > 0).nonzero()[:, 0]
    if len(drawn):
        keys = row_keys(rows.seed_low[drawn], rows.seed_high[drawn], rows.positions[drawn])
        noise = gumbel_noise(random_bits(keys, first_index, logits.shape[1]))
        scores = logits.index_copy(0, drawn, logits[drawn] * (1.0 / rows.temperature[drawn, None]) + noise)
    if thresholds is not None:
        scores = scores.masked_fill(logits < thresholds[:, None], -torch.inf)
    best, index = scores.max(1)
    return best.masked_fill(~finite, torch.inf), (index + first_index).masked_fill(~finite, -1).int()
