"""Recurrent states of layers, and the order in which the sequences of a step read and write them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, starmap
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch

from minisgl.attention.state_shape import StateShape
from minisgl.kernels.attention.causal_convolution import convolve, convolve_rows
from minisgl.kernels.attention.prompt_chunks import PromptChunks, Segment
from minisgl.wire.plan import NO_STATE_CHANGES, IntArray, StateChange


class Convolution(NamedTuple):
    """Convolution of a layer over time, of each channel by itself."""

    weight: torch.Tensor
    """[channels, kernel_size]"""
    bias: torch.Tensor | None = None
    silu: bool = True
    """The activation follows."""


class Rule(Protocol):
    """What the tokens of a layer do to its matrices, and read from them: `mixed` [N, channels], what the convolution
    gives, and `gates` [N, …] as projected to outputs [N, heads, value_dim], in float32 or the type of `mixed`."""

    def one_token(
        self, mixed: torch.Tensor, gates: tuple[torch.Tensor, ...], states: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """The next token of N sequences, whose matrices are at `slots` [N] int64 of `states` [places, heads, key_dim,
        value_dim] float32, and change there."""
        ...

    def many_tokens(
        self, mixed: torch.Tensor, gates: tuple[torch.Tensor, ...], state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next N tokens of one sequence; `state` [heads, key_dim, value_dim] float32. Returns outputs, and the
        state behind them."""
        ...

    def prompts(
        self,
        mixed: torch.Tensor,
        gates: tuple[torch.Tensor, ...],
        states: torch.Tensor,
        checkpoints: torch.Tensor,
        slots: torch.Tensor,
        chunks: PromptChunks,
    ) -> torch.Tensor:
        """The next tokens of several sequences on CUDA, whose matrices are at `slots` [P] of `states` and change there,
        and are saved in `checkpoints` [count, heads, key_dim, value_dim], in float32 or rounded to 16 bits."""
        ...


class Prompts(NamedTuple):
    """Segments of prompts on CUDA."""

    slots: torch.Tensor
    """[P] int32"""
    offsets: torch.Tensor
    """[P + 1] int32: the tokens of segment p are those from offsets[p] up to offsets[p + 1]."""
    chunks: PromptChunks


class _Piece(NamedTuple):
    """Tokens of a segment up to a state that is saved, or to its end."""

    slot: int
    length: int
    saved: int | None
    """Checkpoint that gets the state behind them."""


_COPIED: Final = 2
"""States that are copied at a time."""
_STEPS: Final = {StateChange.LOAD: 0, StateChange.MOVE: 1, StateChange.ZERO: 2, StateChange.POISON: 5}
_WITHIN, _LAST = 3, 4
"""The steps of `StateChange.SAVE`."""


class StateChanges(NamedTuple):
    """`StepPlan.state_changes` in the order in which a step makes them."""

    columns: IntArray
    """[4, K], of which each kind has a slice."""
    loads: slice
    moves: slice
    zeros: slice
    saved_within: slice
    """States behind a token in the middle of a segment."""
    saved_last: slice
    """States behind the last token that the step computes of a row."""
    poisoned: slice

    @staticmethod
    def of(columns: IntArray, slots: IntArray, ends: IntArray) -> StateChanges:
        """`slots` and `ends` [P]: of the segments of prompts, and how many tokens each row has behind its own."""
        if not columns.shape[1]:
            return _NO_CHANGES
        by_slot = dict(zip(slots.tolist(), ends.tolist(), strict=True))

        def step_of(column: Sequence[int]) -> int:
            kind, slot, tokens, _ = column
            if kind == StateChange.SAVE:
                return _WITHIN if by_slot.get(slot, tokens) != tokens else _LAST
            return _STEPS[kind]

        steps = np.array([step_of(column) for column in columns.T.tolist()], np.int32)
        order = np.argsort(steps, kind="stable")
        edges = np.searchsorted(steps[order], range(len(StateChanges._fields))).tolist()
        return StateChanges(columns[:, order], *starmap(slice, pairwise(edges)))

    @property
    def within(self) -> dict[int, list[tuple[int, int]]]:
        """Numbers of tokens in the middle of segments, and the checkpoints of the states behind them, by slot."""
        found: dict[int, list[tuple[int, int]]] = {}
        for _, slot, tokens, checkpoint in self.columns[:, self.saved_within].T.tolist():
            found.setdefault(slot, []).append((tokens, checkpoint))
        return found


_NO_CHANGES: Final = StateChanges(NO_STATE_CHANGES, *[slice(0, 0)] * 6)


class RecurrentStates:
    """One slot for each row of the tables, the dummy row included, and checkpoints behind them. A slot has what the
    last token of its sequence left: so a row's tokens come in order, and none is computed twice. Matrices of slots are
    in float32, because rounding adds up over a text. Those of checkpoints are rounded once: beside activations of 16
    bits they have 16, too, as float16, whose rounding is an eighth of bfloat16's. Then two take the memory of a slot.
    Slots of rows that are not in use may have checkpoints, too, whose numbers are negative: −1 is the last one in the
    last slot.

    On CUDA all that a forward pass needs is on the device, so that it can be captured in a CUDA graph: `change` comes
    before it, and `save_last` behind it."""

    def __init__(
        self,
        shapes: Sequence[StateShape],
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        checkpoints: int = 0,
        audit: bool = False,
        shared: bool = False,
    ) -> None:
        """`shapes`: of each layer with a state, all the same; `rows`: of the tables. `audit`: fill states with NaN,
        which shows where one is read before it is set. `shared`: all rows and layers have one state, for steps that
        belong to no request."""
        [of] = {*shapes}
        per_row = of.checkpoints_per_row(dtype.itemsize)
        self._first_checkpoint = 0 if shared else rows * per_row
        layers, places = (1, 1) if shared else (len(shapes), rows + -(-checkpoints // per_row))
        matrix = of.heads, of.key_dim, of.value_dim
        # Not zeros: on a CPU, memory of the operating system is only taken when it is written.
        inputs = torch.empty(layers, places * per_row, of.kernel_size - 1, of.channels, dtype=dtype, device=device)
        matrices = torch.empty(layers, places, *matrix, device=device)
        if audit:
            for states in (inputs, matrices):
                states.fill_(math.nan)
        narrow = matrices.view(torch.float32 if per_row == 1 else torch.float16)
        self._kept = inputs, narrow.view(layers, places * per_row, *matrix)
        """Checkpoints: inputs of the convolution, and matrices."""
        self._slots = inputs[:, ::per_row], matrices
        """Rows, in the same memory."""
        dummy = 0 if shared else rows - 1
        for states in self._slots:
            # No plan sets that of the dummy row.
            states[:, dummy].zero_()
        if shared:
            kept, slots = ([states[:1, :1] for states in each] for each in (self._kept, self._slots))
            self._kept = _repeated(kept[0], len(shapes), 0), _repeated(kept[1], len(shapes), 0)
            self._slots = _repeated(slots[0], len(shapes), rows), _repeated(slots[1], len(shapes), rows)
        self._decode_slots = torch.empty(0, dtype=torch.int64, device=device)
        self._prompts: Prompts | None = None
        self._pieces: list[_Piece] = []
        self._changes = _NO_CHANGES
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None
        """Slots whose last states are saved, and the places that get them."""

    def change(self, changes: StateChanges, columns: torch.Tensor) -> None:
        """Load, move, zero and poison states for the next step. `begin` follows, for those that it saves. `columns`:
        those of `changes` on the device."""
        self._changes = changes
        self._last = None
        if not columns.shape[1]:
            return
        slots, places = columns[1].long(), columns[3].long() + self._first_checkpoint
        if changes.loads.stop > changes.loads.start:
            _copy(self._slots, slots[changes.loads], self._kept, places[changes.loads])
        if changes.moves.stop > changes.moves.start:
            targets = slots[changes.moves] + self._first_checkpoint
            _copy(self._kept, targets, self._kept, places[changes.moves])
        if changes.zeros.stop > changes.zeros.start:
            _fill(self._slots, slots[changes.zeros], 0.0)
        if changes.poisoned.stop > changes.poisoned.start:
            _fill(self._kept, places[changes.poisoned], math.nan)
        if changes.saved_last.stop > changes.saved_last.start:
            self._last = slots[changes.saved_last], places[changes.saved_last]

    def begin(self, decode_slots: torch.Tensor, segments: Sequence[Segment]) -> None:
        """Use the rows of a step on a CPU: first the decode rows [D], then the segments of prompts."""
        self._decode_slots = decode_slots.long()
        saves = self._changes.within
        self._pieces = [piece for segment in segments for piece in _pieces(segment, saves.get(segment.slot, ()))]

    def begin_cuda(self, decode_slots: torch.Tensor, prompts: Prompts | None) -> None:
        """The same on CUDA; `prompts`: None if the step has none."""
        self._decode_slots, self._prompts = decode_slots, prompts

    def save_last(self) -> None:
        """Save the states that the step has left behind the last tokens of rows."""
        if self._last is not None:
            slots, places = self._last
            _copy(self._kept, places, self._slots, slots)

    def mix(
        self, layer: int, x: torch.Tensor, convolution: Convolution, rule: Rule | None, *gates: torch.Tensor
    ) -> torch.Tensor:
        """Inputs of all tokens x [T, channels] to outputs [T, heads, value_dim], in float32 or the type of `x`; without
        a rule to those of the convolution, [T, channels]. `layer`: its number among the layers with states; `gates`:
        [T, …]."""
        inputs, matrices = (states[layer] for states in self._slots)
        kept = tuple(states[layer, self._first_checkpoint :] for states in self._kept)
        outputs = []
        rows = len(self._decode_slots)
        if rows:
            slots = self._decode_slots
            out = convolve_rows(x[:rows], inputs, slots, *convolution[:2], silu=convolution.silu)
            if rule is not None:
                out = rule.one_token(out, tuple(each[:rows] for each in gates), matrices, slots)
            outputs.append(out)
        rest = x[rows:], tuple(each[rows:] for each in gates)
        if x.is_cuda:
            if self._prompts is not None:
                outputs.append(self._mix_prompts(self._prompts, *rest, convolution, rule, inputs, matrices, kept))
        else:
            outputs += self._mix_pieces(*rest, convolution, rule, inputs, matrices, kept)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _mix_prompts(
        self,
        of: Prompts,
        x: torch.Tensor,
        gates: tuple[torch.Tensor, ...],
        convolution: Convolution,
        rule: Rule | None,
        inputs: torch.Tensor,
        matrices: torch.Tensor,
        kept: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        from minisgl.kernels.attention.convolution_prefill_triton import convolve_prompts_cuda

        mixed = convolve_prompts_cuda(
            x, inputs, kept[0], of.slots, of.offsets, of.chunks, *convolution[:2], silu=convolution.silu
        )
        return mixed if rule is None else rule.prompts(mixed, gates, matrices, kept[1], of.slots, of.chunks)

    def _mix_pieces(
        self,
        x: torch.Tensor,
        gates: tuple[torch.Tensor, ...],
        convolution: Convolution,
        rule: Rule | None,
        inputs: torch.Tensor,
        matrices: torch.Tensor,
        kept: tuple[torch.Tensor, ...],
    ) -> Iterator[torch.Tensor]:
        begin = 0
        for slot, length, saved in self._pieces:
            part = slice(begin, begin + length)
            begin += length
            mixed, last = convolve(x[None, part], inputs[slot, None], *convolution[:2], silu=convolution.silu)
            out, inputs[slot] = mixed[0], last[0]
            if rule is not None:
                out, matrices[slot] = rule.many_tokens(out, tuple(each[part] for each in gates), matrices[slot])
            yield out
            if saved is not None:
                kept[0][saved], kept[1][saved] = inputs[slot], _rounded(matrices[slot], kept[1].dtype)


_States = tuple[torch.Tensor, torch.Tensor]
"""Inputs and matrices [layers, places, …]."""


def _repeated(state: torch.Tensor, layers: int, places: int) -> torch.Tensor:
    """One state [1, 1, …] for all layers and places."""
    return state[:, :places].expand(layers, places, *state.shape[2:])


def _copy(to: _States, places: torch.Tensor, of: _States, sources: torch.Tensor) -> None:
    """Copy the states of all layers between places, both [N] int64."""
    # A few at a time: each of these copies needs as much memory again, which no step is known to have.
    for some, others in zip(places.split(_COPIED), sources.split(_COPIED), strict=True):
        for target, source in zip(to, of, strict=True):
            target[:, some] = _rounded(source[:, others], target.dtype)


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if x.dtype == torch.float32 and dtype == torch.float16:
        # What is beyond its range would become infinite.
        x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return x.to(dtype)


def _fill(states: _States, places: torch.Tensor, value: float) -> None:
    for each in states:
        each.index_fill_(1, places, value)


def _pieces(segment: Segment, saves: Sequence[tuple[int, int]]) -> Iterator[_Piece]:
    """Cut a segment behind each of its tokens whose state is saved."""
    end = segment.start + segment.length
    start = segment.start
    for tokens, checkpoint in sorted(saves):
        assert start < tokens < end, "a state is saved in the step of its last token"
        yield _Piece(segment.slot, tokens - start, checkpoint)
        start = tokens
    if start < end:
        yield _Piece(segment.slot, end - start, None)
