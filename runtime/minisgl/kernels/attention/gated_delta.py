"""The gated delta rule (arXiv:2412.06464) in torch: reference, and implementation on CPUs.

A head's state S [key_dim, value_dim] maps keys to values. Each token lets it decay, then moves the value that it has
for the token's key towards the token's value: S ← exp(decay)·S + step · k ⊗ (v − (exp(decay)·S)ᵀ k), and reads Sᵀ q.
"""

from __future__ import annotations

from typing import Final

import torch

_CHUNK: Final = 64
"""Tokens that are computed together. The work within a chunk grows with its square, the rest falls with its length."""
NORM_EPS: Final = 1e-6


def normalized(x: torch.Tensor) -> torch.Tensor:
    """Queries or keys of length 1, in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + NORM_EPS)


def one_token(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, step: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next token of N sequences: q and k [N, H, K], v [N, H, V], decay and step [N, H], state [N, H, K, V], all in
    float32. Returns outputs [N, H, V] and the new states."""
    state = state * decay.exp()[..., None, None]
    correction = step[..., None] * (v - torch.einsum("nhkv,nhk->nhv", state, k))
    state = state + k[..., None] * correction[..., None, :]
    return torch.einsum("nhkv,nhk->nhv", state, q), state


def many_tokens(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, step: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next T tokens of one sequence: q and k [T, H, K], v [T, H, V], decay and step [T, H], state [H, K, V], all in
    float32. Returns outputs [T, H, V] and the new state."""
    outputs = []
    chunks = (part.transpose(0, 1).split(_CHUNK, dim=1) for part in (q, k, v, decay, step))
    for queries, keys, values, decays, steps in zip(*chunks, strict=True):
        out, state = _chunk(queries, keys, values, decays, steps, state)
        outputs.append(out)
    return torch.cat(outputs, dim=1).transpose(0, 1), state


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, step: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`many_tokens` with heads first: [H, C, …].

    The corrections of a chunk's tokens depend on each other as a triangular system of equations (the WY form, section
    3.3 of the paper)."""
    total = decay.cumsum(1)
    since = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
    weighted = step[..., None] * k
    coupling = ((weighted @ k.transpose(1, 2)) * since).tril(-1)
    known = torch.cat((step[..., None] * v, weighted * total.exp()[..., None]), dim=-1)
    identity = torch.eye(q.shape[1], dtype=q.dtype, device=q.device)
    solved = torch.linalg.solve_triangular(identity + coupling, known, upper=False, unitriangular=True)
    values, keys = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    corrections = values - keys @ state
    out = (q * total.exp()[..., None]) @ state + ((q @ k.transpose(1, 2)) * since) @ corrections
    left = (total[:, -1:] - total).exp()[..., None]
    return out, state * total[:, -1].exp()[:, None, None] + (k * left).transpose(1, 2) @ corrections
