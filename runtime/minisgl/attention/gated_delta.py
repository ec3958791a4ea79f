"""Recurrent states by the gated delta rule: what a layer does with its mixed inputs."""

from __future__ import annotations

import torch

from minisgl.kernels.attention.gated_delta import NORM_EPS, many_tokens, normalized, one_token


class GatedDeltaRule:
    """Gates are decay and step of each token, [N, value heads] float32."""

    def __init__(self, key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> None:
        """Heads of one rank."""
        self._key_heads = key_heads
        self._value_heads = value_heads
        self._key_dim = key_dim
        self._value_dim = value_dim

    def one_token(
        self, mixed: torch.Tensor, gates: tuple[torch.Tensor, ...], states: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        decay, step = gates
        if mixed.is_cuda:
            from minisgl.kernels.attention.recurrent_decode_triton import gated_delta_rows_cuda

            return gated_delta_rows_cuda(mixed, decay, step, states, slots, self._key_heads, NORM_EPS)
        out, states[slots] = one_token(*self._split(mixed), decay, step, states[slots])
        return out

    def many_tokens(
        self, mixed: torch.Tensor, gates: tuple[torch.Tensor, ...], state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        decay, step = gates
        return many_tokens(*self._split(mixed), decay, step, state)

    def _split(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[N, channels] to queries and keys [N, value heads, key_dim] and values [N, value heads, value_dim]."""
        keys = self._key_heads * self._key_dim
        q, k, v = mixed.split((keys, keys, self._value_heads * self._value_dim), dim=-1)
        group = self._value_heads // self._key_heads
        queries, known = (
            normalized(part.unflatten(-1, (self._key_heads, self._key_dim))).repeat_interleave(group, 1)
            for part in (q, k)
        )
        return queries * self._key_dim**-0.5, known, v.unflatten(-1, (self._value_heads, self._value_dim)).float()
