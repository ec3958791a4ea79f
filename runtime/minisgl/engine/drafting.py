"""Drafts of a draft head: the contexts that it keeps of all sequences, and its pass behind a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from minisgl.attention.batch import PagedKV
from minisgl.engine.sampler import Sampler
from minisgl.engine.tables import Tables
from minisgl.kernels.attention.block_attention import block_attention
from minisgl.kernels.attention.block_contexts import Contexts
from minisgl.kernels.attention.rotary import rotate_queries
from minisgl.kernels.attention.rotation import Rotation
from minisgl.kernels.attention.stored_kv import put
from minisgl.kernels.speculation.row_text_tables import NO_TOKEN
from minisgl.kernels.speculation.step_rows import SampledRows
from minisgl.models.decoder import Decoder
from minisgl.models.drafter import Drafter
from minisgl.wire.messages import MOST_DRAFTS

MOST_DRAFTED_ROWS: Final = 64
"""Most rows of a step behind which the head runs. For more it computes about as much as the model itself."""

_WARM_UP_ROWS: Final = (*range(1, 18), 32, 48, MOST_DRAFTED_ROWS)
"""Rows of passes that launch all kernels: products have others by their rows."""


@dataclass(frozen=True, slots=True)
class _BlockAttention:
    """Implements `interface.Attention` for the layers of a draft head."""

    kv: PagedKV
    contexts: Contexts
    scale: float

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        rotation: Rotation,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert k is not None and v is not None and sinks is None
        q = rotate_queries(q, rotation)
        k = rotate_queries(k, replace(rotation, q_gain=rotation.k_gain))
        pool = self.kv.keys[layer], self.kv.values[layer]
        return block_attention(q, k, v, *pool, self.contexts, self.scale).flatten(1)


class Drafting:
    """A draft head with its contexts. They are in pages like keys and values of the model, those of the same numbers,
    so a cached prefix has its context. No method waits for the device."""

    def __init__(self, drafter: Drafter, target: Decoder, kv: PagedKV, tables: Tables) -> None:
        assert tables.texts is not None
        self.kv = kv
        self.most_rows = MOST_DRAFTED_ROWS
        """Most rows of a step behind which the head runs. Larger steps have the drafts that texts give."""
        self._drafter = drafter
        self._target = target
        self._tables, self._texts = tables, tables.texts
        self._number = min(drafter.config.block_size - 1, MOST_DRAFTS)

    def store(self, states: Sequence[torch.Tensor], positions: torch.Tensor, locations: torch.Tensor) -> None:
        """Store the context of all tokens of a step: `states` [T, hidden] behind each of the target's layers. Those of
        rejected drafts are overwritten, as their keys and values are. A CUDA graph can capture it."""
        for layer, (k, v) in enumerate(self._drafter.context(states, positions)):
            put(self.kv.keys[layer].flatten(0, 1), locations, k)
            put(self.kv.values[layer].flatten(0, 1), locations, v)

    def draft(self, rows: SampledRows, sampler: Sampler) -> None:
        """Replace the drafts of `rows`, whose last tokens are known, by those of the head. Drafts from the text that a
        request predicts stay."""
        if not 0 < len(rows.slots) <= self.most_rows:
            return
        texts, slots = self._texts, rows.slots.long()
        positions, origins, sources = (of[slots] for of in (texts.next_position, texts.origin, texts.source))
        tokens = texts.texts[slots, (origins + positions).long()].clamp(min=0)
        # Before the pass: the kernel that samples reads them before the launch ahead of it has ended.
        after = positions[:, None] + torch.arange(1, MOST_DRAFTS + 1, dtype=torch.int32, device=positions.device)
        sample_positions = after[:, : self._number].flatten()
        sample_slots = rows.slots.repeat_interleave(self._number, output_size=len(sample_positions))
        contexts = Contexts(self._tables.page_table, rows.slots, texts.next_position)
        attention = _BlockAttention(self.kv, contexts, self._drafter.config.attention.scale)
        hidden = self._drafter.hidden(self._target, tokens, positions, attention)
        # The first token of a block is known.
        logits = self._target.local_logits(hidden[:, 1 : 1 + self._number].flatten(0, 1))
        # By the random numbers of their places: a draft of the right distribution is the sampled token more often.
        sampled = sampler.sample(logits, sample_slots, sample_positions)
        drafts = torch.full_like(after, NO_TOKEN)
        drafts[:, : self._number] = sampled.view(len(slots), -1)
        places = slots[:, None], (origins[:, None] + after).long()
        is_predicted = ((sources > 0) & (sources < origins))[:, None]
        texts.texts[places] = torch.where(is_predicted, texts.texts[places], drafts)

    def warm_up(self, sampler: Sampler) -> None:
        """Launch the kernels of passes of all sizes that steps have, with the dummy slot."""
        # Slots of requests come before it.
        slot = self._tables.dummy_slot
        dummy = torch.full((min(MOST_DRAFTED_ROWS, slot),), slot, dtype=torch.int32, device=self._device)
        with torch.inference_mode():
            for count in sorted({min(count, len(dummy)) for count in _WARM_UP_ROWS}):
                rows = dummy[:count]
                self.draft(SampledRows(rows, rows, rows), sampler)

    @property
    def _device(self) -> torch.device:
        return self._tables.page_table.device
