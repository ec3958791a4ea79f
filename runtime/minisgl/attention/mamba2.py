"""Recurrent states of Mamba-2: what a layer does with its mixed inputs."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F

from minisgl.kernels.attention.mamba2 import many_tokens, one_token
from minisgl.kernels.attention.prompt_chunks import PromptChunks

_MOST_DECAY: Final = -30.0


class Mamba2Rule:
    """The gate is the time step of each token as projected, [N, heads]."""

    def __init__(
        self, heads: int, groups: int, log_decay: torch.Tensor, step_bias: torch.Tensor, skip: torch.Tensor
    ) -> None:
        """Heads and groups of one rank. `log_decay`, `step_bias` and `skip` [heads] float32: logarithm of how fast the
        state of each head decays, what is added to a time step, and what of an input goes past the state."""
        self._heads = heads
        self._groups = groups
        self._log_decay = log_decay
        self._step_bias = step_bias
        self._skip = skip

    def one_token(
        self, mixed: torch.Tensor, gates: tuple[torch.Tensor, ...], states: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        if mixed.is_cuda:
            from minisgl.kernels.attention.recurrent_decode_triton import mamba2_rows_cuda

            (raw,), (log_decay, bias, skip) = gates, self._of_heads
            return mamba2_rows_cuda(mixed, raw, log_decay, bias, skip, states, slots, self._groups)
        step = self._step(gates)
        values, keys, queries = self._split(mixed, states)
        out, states[slots] = one_token(queries, keys, values * step[..., None], self._decay(step), states[slots])
        return out + self._skip[:, None] * values

    def many_tokens(
        self, mixed: torch.Tensor, gates: tuple[torch.Tensor, ...], state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step = self._step(gates)
        values, keys, queries = self._split(mixed, state)
        out, state = many_tokens(queries, keys, values * step[..., None], self._decay(step), state)
        return out + self._skip[:, None] * values, state

    def prompts(
        self,
        mixed: torch.Tensor,
        gates: tuple[torch.Tensor, ...],
        states: torch.Tensor,
        checkpoints: torch.Tensor,
        slots: torch.Tensor,
        chunks: PromptChunks,
    ) -> torch.Tensor:
        from minisgl.kernels.attention.mamba2_prefill_triton import mamba2_prompts_cuda

        (raw,), (log_decay, bias, skip) = gates, self._of_heads
        return mamba2_prompts_cuda(
            *(mixed, raw, log_decay, bias, skip, states),
            checkpoints,
            slots,
            chunks,
            self._groups,
            _MOST_DECAY,
        )

    @property
    def _of_heads(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._log_decay, self._step_bias, self._skip

    def _step(self, gates: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Time steps in float32."""
        (step,) = gates
        return F.softplus(step.float() + self._step_bias)

    def _decay(self, step: torch.Tensor) -> torch.Tensor:
        # Less than the last bit is left of a state. Sums of larger ones would cancel in chunks.
        return (-self._log_decay.exp() * step).clamp(min=_MOST_DECAY)

    def _split(self, mixed: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[N, channels] to values [N, heads, value_dim], and keys and queries [N, heads, key_dim], in float32. The
        heads of a group have the same keys and queries."""
        key_dim, value_dim = state.shape[-2:]
        shared = self._groups * key_dim
        values, *others = mixed.float().split((self._heads * value_dim, shared, shared), dim=-1)
        keys, queries = (
            each.unflatten(-1, (self._groups, key_dim)).repeat_interleave(self._heads // self._groups, 1)
            for each in others
        )
        return values.unflatten(-1, (self._heads, value_dim)), keys, queries
