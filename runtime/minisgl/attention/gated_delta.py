"""Recurrent states by the gated delta rule: what a layer does with its mixed inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minisgl.kernels.attention.gated_delta import NORM_EPS, many_tokens, normalized, one_token
from minisgl.kernels.attention.prompt_chunks import PromptChunks


class GatedDeltaRule:
    """Gates are decay and step of each token as projected, [N, value heads] each."""

    def __init__(
        self,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        log_decay: torch.Tensor,
        decay_bias: torch.Tensor,
    ) -> None:
        """Heads of one rank. `log_decay` and `decay_bias` [value heads] float32: logarithm of how fast the state of
        each head decays, and what is added to the decay of a token."""
        self._key_heads = key_heads
        self._value_heads = value_heads
        self._key_dim = key_dim
        self._value_dim = value_dim
        self._of_heads = log_decay, decay_bias

    def one_token(
        self, mixed: torch.Tensor, gates: tuple[torch.Tensor, ...], states: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        if mixed.is_cuda:
            from minisgl.kernels.attention.recurrent_decode_triton import gated_delta_rows_cuda

            (decay, step), (log_decay, bias) = gates, self._of_heads
            return gated_delta_rows_cuda(mixed, decay, step, log_decay, bias, states, slots, self._key_heads, NORM_EPS)
        out, states[slots] = one_token(*self._split(mixed), *self._wide(gates), states[slots])
        return out

    def many_tokens(
        self, mixed: torch.Tensor, gates: tuple[torch.Tensor, ...], state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return many_tokens(*self._split(mixed), *self._wide(gates), state)

    def prompts(
        self,
        mixed: torch.Tensor,
        gates: tuple[torch.Tensor, ...],
        states: torch.Tensor,
        checkpoints: torch.Tensor,
        slots: torch.Tensor,
        chunks: PromptChunks,
    ) -> torch.Tensor:
        from minisgl.kernels.attention.gated_delta_prefill_triton import gated_delta_prompts_cuda

        (decay, step), (log_decay, bias) = gates, self._of_heads
        return gated_delta_prompts_cuda(
            *(mixed, decay, step, log_decay, bias, states),
            checkpoints,
            slots,
            chunks,
            self._key_heads,
            NORM_EPS,
        )

    def _wide(self, gates: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Decay, a logarithm, and step in float32."""
        (decay, step), (log_decay, bias) = gates, self._of_heads
        return -log_decay.exp() * F.softplus(decay.float() + bias), torch.sigmoid(step.float())

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
