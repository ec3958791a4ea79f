"""Attention without a KV pool, for tests of models alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from minisgl.attention.recurrent import RecurrentStates, StateChanges
from minisgl.kernels.attention.prompt_chunks import Segment
from minisgl.kernels.attention.rotation import Rotation
from minisgl.models.config import ModelConfig
from minisgl.models.decoder_config import LayerConfig, attentions, kv_layers
from minisgl.wire.plan import StateChange


class SequenceAttention:
    """Causal attention over whole sequences that lie one after the other in the batch."""

    def __init__(self, lengths: Sequence[int], layers: Sequence[LayerConfig]) -> None:
        self._lengths = list(lengths)
        self._layers = attentions(layers)
        self._kv_layers = kv_layers(layers)
        self._stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        rotation: Rotation,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        of = self._layers[layer]
        assert (k is None) == (v is None) == of.reuses_kv
        if k is None or v is None:
            q = rotation.apply_to_queries(q)
        else:
            q, k = rotation.apply(q, k)
            self._stored[layer] = k, v
        k, v = self._stored[self._kv_layers[layer]]
        outputs = []
        parts = zip(*(torch.split(tensor, self._lengths) for tensor in (q, k, v)), strict=True)
        for query, key, value in parts:
            group = query.shape[1] // key.shape[1]
            q_heads = query.transpose(0, 1)
            k_heads, v_heads = (part.transpose(0, 1).repeat_interleave(group, 0) for part in (key, value))
            positions = torch.arange(len(query), device=q.device)
            distances = positions[:, None] - positions
            mask = (distances >= 0) & (distances < (of.window or len(query)))
            scores = (q_heads @ k_heads.transpose(1, 2)).float() * of.scale
            if of.softcap is not None:
                scores = torch.tanh(scores / of.softcap) * of.softcap
            scores = scores.masked_fill(~mask, float("-inf"))
            if sinks is not None:
                scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, len(query), 1)), dim=-1)
            weights = torch.softmax(scores, dim=-1)[..., : len(query)].to(value.dtype)
            outputs.append((weights @ v_heads).transpose(0, 1).flatten(1))
        return torch.cat(outputs)


def change(states: RecurrentStates, *columns: tuple[int, int, int, int], segments: Sequence[Segment] = ()) -> None:
    """Make changes of states before a step with these segments of prompts."""
    slots, ends = ([each.slot for each in segments], [each.start + each.length for each in segments])
    plan = np.array(columns, np.int32).reshape(-1, 4).T
    changes = StateChanges.of(plan, np.array(slots, np.int32), np.array(ends, np.int32))
    states.change(changes, torch.from_numpy(changes.columns))


def states_of(lengths: Sequence[int], config: ModelConfig, ranks: int = 1) -> RecurrentStates | None:
    """States of the layers that have some, for the same batch; None: there are no such layers."""
    shapes = config.state_shapes(ranks)
    if not shapes:
        return None
    states = RecurrentStates(shapes, len(lengths), torch.float32, torch.device("cpu"))
    change(states, *((StateChange.ZERO, slot, 0, 0) for slot in range(len(lengths))))
    states.begin(torch.empty(0, dtype=torch.int64), [Segment(slot, 0, each) for slot, each in enumerate(lengths)])
    return states
