"""Log-probabilities of the raw distribution: before temperature, penalties and bias."""

from __future__ import annotations

from typing import Final

import torch

PROMPT_CHUNK: Final = 256
"""Prompt positions whose logits exist at a time."""


def report(logits: torch.Tensor, chosen: torch.Tensor, tops: int) -> torch.Tensor:
    """int32 [N, 1 + 2 K]: the chosen token's log-probability, the ids of the K = min(`tops`, vocab) likeliest tokens
    and their log-probabilities (float bits), best first.

    `logits` [N, vocab] over the whole vocabulary, `chosen` [N] token ids; −1 counts as token 0.
    """
    logits = logits.float()
    total = logits.logsumexp(1, keepdim=True)
    values, ids = logits.topk(min(tops, logits.shape[1]), 1)
    own = logits.gather(1, chosen.long().clamp(min=0)[:, None])
    return torch.cat(((own - total).view(torch.int32), ids.int(), (values - total).view(torch.int32)), 1)
