"""Attention of models whose layers differ: in windows, in heads, or in whose keys and values they read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from minisgl.attention.batch import AttentionBatch
from minisgl.attention.cascade_backend import CascadeDecode
from minisgl.attention.paged import PagedAttention
from minisgl.kernels.attention.rotation import Rotation
from minisgl.wire.plan import IntArray


class LayerPlace(NamedTuple):
    """Where the attention of a layer is computed."""

    kind: int
    """Kind of the layer."""
    layer: int
    """Layer of the kind's pool with the keys and values that it reads."""


class LayeredAttention:
    """Implements `interface.Attention` by one `PagedAttention` for each kind of layer. With one kind it only passes
    calls on."""

    def __init__(self, kinds: Sequence[PagedAttention], places: Sequence[LayerPlace]) -> None:
        """`places`: of each layer of the model."""
        self._kinds = tuple(kinds)
        self._places = tuple(places)

    @property
    def cascade(self) -> CascadeDecode | None:
        """Backend of shared prefixes. Layers that have none read each row by itself."""
        return next((kind.cascade for kind in self._kinds if kind.cascade is not None), None)

    @property
    def most_graph_keys(self) -> int:
        """Most keys of all prompt segments of a captured step; 0: steps with prompts cannot be captured."""
        return min(kind.most_graph_keys for kind in self._kinds)

    def is_long(self, lengths: IntArray) -> bool:
        """Whether steps of decode rows of these `lengths` [D] have graphs of their own, see `for_long_graph`."""
        return any(kind.is_long(lengths) for kind in self._kinds)

    def for_long_graph(self, rows: int) -> LayeredAttention | None:
        """Attention for captured steps of exactly `rows` decode rows that are `is_long`; None if there are none."""
        long = [kind.for_long_graph(rows) for kind in self._kinds]
        if all(kind is None for kind in long):
            return None
        return self._with([each or kind.for_graph(rows) for each, kind in zip(long, self._kinds, strict=True)])

    def for_graph(
        self, rows: int, tokens: int = 0, *, segments: int = 0, prefix: bool = True
    ) -> LayeredAttention | None:
        """As `PagedAttention.for_graph`."""
        return self._with([kind.for_graph(rows, tokens, segments=segments, prefix=prefix) for kind in self._kinds])

    def prepare(self, batch: AttentionBatch) -> None:
        """Do the host work of the step. It stays outside a CUDA graph: every replay needs it again."""
        for kind, of_kind in zip(self._kinds, self._batches(batch), strict=True):
            kind.prepare(of_kind)

    def begin(
        self, batch: AttentionBatch, locations: torch.Tensor, window_locations: torch.Tensor | None = None
    ) -> None:
        """As `PagedAttention.begin`. `window_locations`: those in the pages of layers with a window."""
        for kind, of_kind in zip(self._kinds, self._batches(batch), strict=True):
            if kind.in_window:
                assert window_locations is not None
                kind.begin(of_kind, window_locations)
            else:
                kind.begin(of_kind, locations)

    def _batches(self, batch: AttentionBatch) -> list[AttentionBatch]:
        """The batch for each kind."""
        if batch.window_table is None:
            return [batch] * len(self._kinds)
        in_window = batch.in_window()
        return [in_window if kind.in_window else batch for kind in self._kinds]

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        rotation: Rotation,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        kind, place = self._places[layer]
        return self._kinds[kind].attend(place, q, k, v, rotation, sinks)

    def _with(self, kinds: Sequence[PagedAttention | None]) -> LayeredAttention | None:
        found = [kind for kind in kinds if kind is not None]
        return LayeredAttention(found, self._places) if len(found) == len(kinds) else None
