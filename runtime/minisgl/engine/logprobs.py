"""Log-probabilities of the raw distribution, before temperature, penalties and bias."""

from __future__ import annotations

from typing import Final

import torch

PROMPT_CHUNK: Final = 64
"""Number of positions whose float32 logits are in memory at a time."""


def report(logits: torch.Tensor, chosen: torch.Tensor, tops: int, named: torch.Tensor | None = None) -> torch.Tensor:
    """Report as int32 [N, 1 + 2 K]: log-probability of the sampled token (float bits), ids of the K = min(`tops`,
    vocab) most likely tokens, and their log-probabilities (float bits), best first.

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
