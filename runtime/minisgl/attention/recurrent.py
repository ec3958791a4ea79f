"""States of layers with linear attention, and the order in which the sequences of a step read and write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from minisgl.kernels.attention.gated_delta import convolve, many_tokens, normalized, one_token


class StateShape(NamedTuple):
    """State of a sequence in one layer, on one rank."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a sequence's state."""
        inputs = (self.kernel_size - 1) * self.channels * dtype.itemsize
        return inputs + self.value_heads * self.key_dim * self.value_dim * torch.float32.itemsize


class Segment(NamedTuple):
    """Tokens of one prompt in a step."""

    slot: int
    start: int
    """Position of the first one."""
    length: int


class RecurrentStates:
    """One slot for each row of the tables, the dummy row included. A sequence starts from zeros at its first token, and
    its slot has what its last token left: so a row's tokens come in order, and none is computed twice."""

    def __init__(self, shapes: Sequence[StateShape], rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """`shapes`: of each layer with linear attention; `rows`: of the tables. Matrices are kept in float32, because
        rounding adds up over a text."""
        self._shapes = tuple(shapes)
        self._inputs = [torch.zeros(rows, of.kernel_size - 1, of.channels, dtype=dtype, device=device) for of in shapes]
        self._matrices = [torch.zeros(rows, of.value_heads, of.key_dim, of.value_dim, device=device) for of in shapes]
        self._decode_slots = torch.empty(0, dtype=torch.int64, device=device)
        self._segments: list[Segment] = []

    def begin(self, decode_slots: torch.Tensor, segments: Sequence[Segment]) -> None:
        """Use the rows of a step: first the decode rows [D], then the segments of prompts."""
        self._decode_slots = decode_slots.long()
        self._segments = list(segments)

    def attend(
        self, layer: int, x: torch.Tensor, weight: torch.Tensor, decay: torch.Tensor, step: torch.Tensor
    ) -> torch.Tensor:
        """Queries, keys and values of all tokens x [T, channels] before their convolution with `weight` [channels,
        kernel_size], decay and step [T, value heads] in float32, to outputs [T, value heads, value_dim] in float32.
        `layer`: its number among the layers with linear attention."""
        inputs, matrices = self._inputs[layer], self._matrices[layer]
        outputs = []
        rows = len(self._decode_slots)
        if rows:
            slots = self._decode_slots
            mixed, inputs[slots] = convolve(x[:rows, None], inputs[slots], weight)
            parts = self._split(layer, mixed[:, 0])
            out, matrices[slots] = one_token(*parts, decay[:rows], step[:rows], matrices[slots])
            outputs.append(out)
        begin = rows
        for slot, start, length in self._segments:
            part = slice(begin, begin + length)
            begin += length
            if start == 0:
                inputs[slot] = 0
                matrices[slot] = 0
            mixed, last = convolve(x[None, part], inputs[slot, None], weight)
            inputs[slot] = last[0]
            out, matrices[slot] = many_tokens(*self._split(layer, mixed[0]), decay[part], step[part], matrices[slot])
            outputs.append(out)
        return torch.cat(outputs)

    def _split(self, layer: int, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[N, channels] to queries and keys [N, value heads, key_dim] and values [N, value heads, value_dim]."""
        of = self._shapes[layer]
        keys = of.key_heads * of.key_dim
        q, k, v = mixed.split((keys, keys, of.value_heads * of.value_dim), dim=-1)
        group = of.value_heads // of.key_heads
        queries, known = (
            normalized(part.unflatten(-1, (of.key_heads, of.key_dim))).repeat_interleave(group, 1) for part in (q, k)
        )
        return queries * of.key_dim**-0.5, known, v.unflatten(-1, (of.value_heads, of.value_dim)).float()
