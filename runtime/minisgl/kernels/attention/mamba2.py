"""State-space duality, the recurrence of Mamba-2 (arXiv:2405.21060), in torch: reference, and implementation on CPUs.

A head's state S [key_dim, value_dim] decays with each token and gets its key times its value, S ← exp(decay)·S + k ⊗ v,
and is read with its query: Sᵀ q. In the paper's letters k is B, q is C, v is Δ·X, and exp(decay) is A.
"""

from __future__ import annotations

from typing import Final

import torch

_CHUNK: Final = 64
"""Tokens that are computed together. The work within a chunk grows with its square, the rest falls with its length."""


def one_token(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next token of N sequences: q and k [N, H, K], v [N, H, V], decay [N, H], state [N, H, K, V], all in float32.
    Returns outputs [N, H, V] and the new states."""
    state = state * decay.exp()[..., None, None] + k[..., None] * v[..., None, :]
    return torch.einsum("nhkv,nhk->nhv", state, q), state


def many_tokens(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next T tokens of one sequence: q and k [T, H, K], v [T, H, V], decay [T, H], state [H, K, V], all in float32.
    Returns outputs [T, H, V] and the new state."""
    outputs = []
    chunks = (part.transpose(0, 1).split(_CHUNK, dim=1) for part in (q, k, v, decay))
    for queries, keys, values, decays in zip(*chunks, strict=True):
        total = decays.cumsum(1)
        since = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
        before = (queries * total.exp()[..., None]) @ state
        outputs.append(before + ((queries @ keys.transpose(1, 2)) * since) @ values)
        left = (total[:, -1:] - total).exp()[..., None]
        state = state * total[:, -1].exp()[:, None, None] + (keys * left).transpose(1, 2) @ values
    return torch.cat(outputs, dim=1).transpose(0, 1), state
