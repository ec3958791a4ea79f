"""Top-k, top-p and min-p in torch, as one threshold per row: the smallest logit that may be sampled. The kernels of
`resample` compute the same on a GPU.

The filters apply in the order of Hugging Face transformers (temperature, top-k, top-p, min-p), each to the result of
the previous one. Tokens of equal logit are kept or removed together, so the result does not depend on a sort order.
Probabilities are added as integers (weights in units of 2^-30 of the largest): the sum is the same in any order and on
any rank.
"""

from __future__ import annotations

import torch

from minisgl.kernels.sampling.sampling_rows import WEIGHT_UNIT, SamplingRows


def top_k_top_p_thresholds(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Thresholds, float32 [S], for `logits` [S, V] over the whole vocabulary. The largest logit is never below its
    threshold."""
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
