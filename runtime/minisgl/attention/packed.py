"""Attention of models that keep no keys: whole sequences of one step, one after the other, without padding.

Three ways, by what a layer needs:
- FlashAttention-3 for sequences of any lengths (arXiv:2407.08608), on Hopper GPUs;
- blocks of the step for layers with a window that is shorter than the longest sequence (`local_blocks`);
- else torch's kernel, for sequences of about the same length at a time (`length_groups`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minisgl.attention.fa3_backend import why_not_on
from minisgl.attention.length_groups import LengthGroup, group_by_length
from minisgl.attention.local_blocks import LocalBlocks
from minisgl.attention.packed_shape import PackedShape
from minisgl.kernels.attention.fa3 import attend_segments
from minisgl.kernels.attention.rotary import rotate_and_store, rotate_queries
from minisgl.kernels.attention.rotation import Rotation
from minisgl.kernels.attention.stored_kv import UNSCALED
from minisgl.wire.plan import IntArray


class PackedAttention:
    """Implements `interface.Attention`. Results of a sequence do not depend on the others, but for rounding."""

    def __init__(
        self, shapes: Sequence[PackedShape], kv_layers: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """`shapes`: of each layer of the model. `kv_layers`: for each layer the one whose keys and values it reads."""
        self._shapes = tuple(shapes)
        self._kv_layers = tuple(kv_layers)
        self._device = device
        self._has_fa3 = [of.softcap is None and why_not_on(device, dtype, of.head_dim) is None for of in self._shapes]
        self._reused = {source for layer, source in enumerate(kv_layers) if source != layer}
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._blocks: dict[tuple[int, bool], LocalBlocks] = {}
        self._groups: list[LengthGroup] | None = None

    @property
    def can_be_captured(self) -> bool:
        """Whether attention follows from what is on the device alone: FlashAttention-3 serves all layers."""
        return all(
            fa3 and of.window is None and not of.sinks for fa3, of in zip(self._has_fa3, self._shapes, strict=True)
        )

    def begin(self, offsets: torch.Tensor, lengths: IntArray) -> None:
        """Bind a step of sequences of `lengths` [S], at least one token each, of which sequence i begins at token
        `offsets[i]` and ends before `offsets[i + 1]` [S + 1] int32 on the device."""
        self._lengths = lengths
        self._begin(offsets, int(lengths.sum()), int(lengths.max()))

    def begin_captured(self, offsets: torch.Tensor, tokens: int) -> None:
        """`begin` of a step of exactly `tokens` tokens in sequences of any lengths, some of them empty, of which a CUDA
        graph that is captured now reads the offsets."""
        assert self.can_be_captured
        self._begin(offsets, tokens, tokens)

    def _begin(self, offsets: torch.Tensor, tokens: int, longest: int) -> None:
        self._offsets, self._tokens, self._longest = offsets, tokens, longest
        self._places = torch.arange(tokens, device=self._device)
        self._blocks.clear()
        self._groups = None

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        rotation: Rotation | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `interface.Attention.attend`, for keys and values of this step alone. Without `rotation` queries and keys
        are taken as they are."""
        shape = self._shapes[layer]
        if k is None or v is None:
            if rotation is not None:
                q = rotate_queries(q, rotation)
            k, v = self._kept[self._kv_layers[layer]]
        else:
            if rotation is not None:
                q, k, v = self._rotated(q, k, v, rotation)
            if layer in self._reused:
                self._kept[layer] = k, v
        # A window that no sequence exceeds would only rule out kernels.
        if shape.window is not None and shape.window < self._longest:
            return self._local_blocks(shape.window, shape.causal).attend(shape, q, k, v, sinks).flatten(1)
        if sinks is None and self._has_fa3[layer]:
            return self._fa3(shape, q, k, v).flatten(1)
        if self._groups is None:
            self._groups = group_by_length(self._lengths, self._device)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in self._groups:
            group.attend(shape, q, k, v, sinks, out)
        return out.flatten(1)

    def _rotated(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if not q.is_cuda:
            return *rotation.apply(q, k), v
        # The kernel stores keys and values: here in the order of the step.
        keys, values = (torch.empty((1, *part.shape), dtype=part.dtype, device=part.device) for part in (k, v))
        q, _, _ = rotate_and_store(q, k, v, rotation, keys, values, self._places, len(q), UNSCALED)
        return q, keys[0], values[0]

    def _local_blocks(self, window: int, causal: bool) -> LocalBlocks:
        key = window, causal
        if key not in self._blocks:
            self._blocks[key] = LocalBlocks(self._offsets, self._tokens, window, causal=causal)
        return self._blocks[key]

    def _fa3(self, shape: PackedShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        attend_segments(
            q,
            k,
            v,
            out,
            self._offsets,
            self._offsets,
            longest_query=self._longest,
            longest_key=self._longest,
            splits=1,
            scale=shape.scale,
            scales=UNSCALED,
            causal=shape.causal,
        )
        return out
