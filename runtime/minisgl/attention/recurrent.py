"""Recurrent states of layers, and the order in which the sequences of a step read and write them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from minisgl.attention.state_shape import StateShape
from minisgl.kernels.attention.causal_convolution import convolve
from minisgl.wire.plan import StateChange


class Convolution(NamedTuple):
    """Convolution of a layer over time, of each channel by itself."""

    weight: torch.Tensor
    """[channels, kernel_size]"""
    bias: torch.Tensor | None = None
    silu: bool = True
    """The activation follows."""


class Rule(Protocol):
    """What the tokens of a layer do to its matrices, and read from them: `mixed` [N, channels], what the convolution
    gives, and `gates` [N, …] to outputs [N, heads, value_dim] in float32 and the new matrices."""

    def one_token(
        self, mixed: torch.Tensor, gates: tuple[torch.Tensor, ...], state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next token of N sequences; `state` [N, heads, key_dim, value_dim] float32."""
        ...

    def many_tokens(
        self, mixed: torch.Tensor, gates: tuple[torch.Tensor, ...], state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next N tokens of one sequence; `state` [heads, key_dim, value_dim] float32."""
        ...


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
        """`shapes`: of each layer with a state; `rows`: of the tables. Matrices are kept in float32, because
        rounding adds up over a text. `audit`: fill them with NaN, which shows where one is read before it is set."""
        self._rows = rows
        places = rows + checkpoints
        # Not zeros: on a CPU, memory of the operating system is only taken when it is written.
        self._inputs = [
            torch.empty(places, of.kernel_size - 1, of.channels, dtype=dtype, device=device) for of in shapes
        ]
        self._matrices = [torch.empty(places, of.heads, of.key_dim, of.value_dim, device=device) for of in shapes]
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

    def mix(
        self, layer: int, x: torch.Tensor, convolution: Convolution, rule: Rule | None, *gates: torch.Tensor
    ) -> torch.Tensor:
        """Inputs of all tokens x [T, channels] to outputs [T, heads, value_dim] in float32; without a rule to those of
        the convolution, [T, channels]. `layer`: its number among the layers with states; `gates`: [T, …]."""
        inputs, matrices = self._inputs[layer], self._matrices[layer]
        outputs = []
        rows = len(self._decode_slots)
        if rows:
            slots = self._decode_slots
            out, inputs[slots] = convolve(x[:rows, None], inputs[slots], *convolution[:2], silu=convolution.silu)
            out = out[:, 0]
            if rule is not None:
                out, matrices[slots] = rule.one_token(out, tuple(each[:rows] for each in gates), matrices[slots])
            outputs.append(out)
            for slot, place in self._decode_saves:
                inputs[place], matrices[place] = inputs[slot], matrices[slot]
        begin = rows
        for slot, length, saved in self._pieces:
            part = slice(begin, begin + length)
            begin += length
            mixed, last = convolve(x[None, part], inputs[slot, None], *convolution[:2], silu=convolution.silu)
            out, inputs[slot] = mixed[0], last[0]
            if rule is not None:
                out, matrices[slot] = rule.many_tokens(out, tuple(each[part] for each in gates), matrices[slot])
            outputs.append(out)
            if saved is not None:
                inputs[saved], matrices[saved] = inputs[slot], matrices[slot]
        return torch.cat(outputs)

    def _fill(self, place: int | slice, value: float) -> None:
        for states in (*self._inputs, *self._matrices):
            states[place] = value


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
