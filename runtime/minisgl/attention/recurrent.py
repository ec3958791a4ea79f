"""States of layers with linear attention, and the order in which the sequences of a step read and write them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from minisgl.kernels.attention.gated_delta import convolve, many_tokens, normalized, one_token
from minisgl.wire.plan import StateChange


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


class Segment(NamedTuple):
    """Consecutive tokens of one prompt in a step."""

    slot: int
    start: int
    """Position of the first one."""
    length: int


class _Piece(NamedTuple):
    """Tokens of a segment up to a state that is saved, or to its end."""

    slot: int
    length: int
    saved: int | None
    """Place that gets the state behind them."""


class RecurrentStates:
    """One slot for each row of the tables, the dummy row included, and checkpoints behind them. A slot has what the
    last token of its sequence left: so a row's tokens come in order, and none is computed twice."""

    def __init__(
        self,
        shapes: Sequence[StateShape],
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        checkpoints: int = 0,
        audit: bool = False,
    ) -> None:
        """`shapes`: of each layer with linear attention; `rows`: of the tables. Matrices are kept in float32, because
        rounding adds up over a text. `audit`: fill them with NaN, which shows where one is read before it is set."""
        self._shapes = tuple(shapes)
        self._rows = rows
        places = rows + checkpoints
        # Not zeros: on a CPU, memory of the operating system is only taken when it is written.
        self._inputs = [
            torch.empty(places, of.kernel_size - 1, of.channels, dtype=dtype, device=device) for of in shapes
        ]
        self._matrices = [torch.empty(places, of.value_heads, of.key_dim, of.value_dim, device=device) for of in shapes]
        if audit:
            self._fill(slice(None), float("nan"))
        # No plan sets that of the dummy row.
        self._fill(rows - 1, 0.0)
        self._decode_slots = torch.empty(0, dtype=torch.int64, device=device)
        self._pieces: list[_Piece] = []
        self._saves: dict[int, list[tuple[int, int]]] = {}
        """Numbers of tokens, ascending, and the places that get the states behind them, by slot."""
        self._decode_saves: list[tuple[int, int]] = []
        """Slots of decode rows, and the places that get their states."""

    def change(self, changes: torch.Tensor) -> None:
        """Load, zero and poison states, as the `StepPlan.state_changes` [4, K] of the next step say. `begin` follows,
        for those that it saves."""
        self._saves = {}
        poisoned = []
        for kind, slot, tokens, checkpoint in changes.T.tolist():
            place = self._rows + checkpoint
            match kind:
                case StateChange.LOAD:
                    for states in (*self._inputs, *self._matrices):
                        states[slot] = states[place]
                case StateChange.ZERO:
                    self._fill(slot, 0.0)
                case StateChange.SAVE:
                    self._saves.setdefault(slot, []).append((tokens, place))
                case _:
                    poisoned.append(place)
        for place in poisoned:
            self._fill(place, float("nan"))

    def begin(self, decode_slots: torch.Tensor, segments: Sequence[Segment]) -> None:
        """Use the rows of a step: first the decode rows [D], then the segments of prompts."""
        self._decode_slots = decode_slots.long()
        self._pieces = [piece for segment in segments for piece in _pieces(segment, self._saves.pop(segment.slot, []))]
        self._decode_saves = [(slot, place) for slot, saves in self._saves.items() for _, place in saves]

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
            for slot, place in self._decode_saves:
                inputs[place], matrices[place] = inputs[slot], matrices[slot]
        begin = rows
        for slot, length, saved in self._pieces:
            part = slice(begin, begin + length)
            begin += length
            mixed, last = convolve(x[None, part], inputs[slot, None], weight)
            inputs[slot] = last[0]
            out, matrices[slot] = many_tokens(*self._split(layer, mixed[0]), decay[part], step[part], matrices[slot])
            outputs.append(out)
            if saved is not None:
                inputs[saved], matrices[saved] = inputs[slot], matrices[slot]
        return torch.cat(outputs)

    def _fill(self, place: int | slice, value: float) -> None:
        for states in (*self._inputs, *self._matrices):
            states[place] = value

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


def _pieces(segment: Segment, saves: Sequence[tuple[int, int]]) -> Iterator[_Piece]:
    """Cut a segment behind each of its tokens whose state is saved."""
    end = segment.start + segment.length
    start = segment.start
    for tokens, place in sorted(saves):
        assert start < tokens <= end, "a state is saved in the step of its last token"
        yield _Piece(segment.slot, tokens - start, place)
        start = tokens
    if start < end:
        yield _Piece(segment.slot, end - start, None)
