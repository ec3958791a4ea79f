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
        first_checkpoint: int,
        slots: torch.Tensor,
        chunks: PromptChunks,
    ) -> torch.Tensor:
        """The next tokens of several sequences on CUDA, whose matrices are at `slots` [P] of `states` and change there,
        and at the places of checkpoints, of which `first_checkpoint` is the first."""
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


_COPIED: Final = 4
"""States that are copied at a time."""
_WITHIN: Final = StateChange.SAVE
_LAST: Final = _WITHIN + 1
_POISONED: Final = _LAST + 1


class StateChanges(NamedTuple):
    """`StepPlan.state_changes` in the order in which a step makes them."""

    columns: IntArray
    """[4, K], of which each kind has a slice."""
    loads: slice
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
            return _POISONED if kind == StateChange.POISON else kind

        steps = np.array([step_of(column) for column in columns.T.tolist()], np.int32)
        order = np.argsort(steps, kind="stable")
        edges = np.searchsorted(steps[order], range(_POISONED + 2)).tolist()
        return StateChanges(columns[:, order], *starmap(slice, pairwise(edges)))

    @property
    def within(self) -> dict[int, list[tuple[int, int]]]:
        """Numbers of tokens in the middle of segments, and the checkpoints of the states behind them, by slot."""
        found: dict[int, list[tuple[int, int]]] = {}
        for _, slot, tokens, checkpoint in self.columns[:, self.saved_within].T.tolist():
            found.setdefault(slot, []).append((tokens, checkpoint))
        return found


_NO_CHANGES: Final = StateChanges(NO_STATE_CHANGES, *[slice(0, 0)] * 5)


class RecurrentStates:
    """One slot for each row of the tables, the dummy row included, and checkpoints behind them. A slot has what the
    last token of its sequence left: so a row's tokens come in order, and none is computed twice. Slots of rows that are
    not in use may have checkpoints, too, whose numbers are negative: −1 is that of the last slot.

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
        """`shapes`: of each layer with a state, all the same; `rows`: of the tables. Matrices are kept in float32,
        because rounding adds up over a text. `audit`: fill them with NaN, which shows where one is read before it is
        set. `shared`: all rows and layers have one state, for steps that belong to no request."""
        [of] = {*shapes}
        self._rows = rows
        places = (1, 1) if shared else (len(shapes), rows + checkpoints)
        # Not zeros: on a CPU, memory of the operating system is only taken when it is written.
        self._inputs = torch.empty(*places, of.kernel_size - 1, of.channels, dtype=dtype, device=device)
        self._matrices = torch.empty(*places, of.heads, of.key_dim, of.value_dim, device=device)
        if audit:
            for states in (self._inputs, self._matrices):
                states.fill_(math.nan)
        dummy = 0 if shared else rows - 1
        for states in (self._inputs, self._matrices):
            # No plan sets that of the dummy row.
            states[:, dummy].zero_()
        if shared:
            self._inputs, self._matrices = (
                states.expand(len(shapes), rows, *states.shape[2:]) for states in (self._inputs, self._matrices)
            )
        self._decode_slots = torch.empty(0, dtype=torch.int64, device=device)
        self._prompts: Prompts | None = None
        self._pieces: list[_Piece] = []
        self._changes = _NO_CHANGES
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None
        """Slots whose last states are saved, and the places that get them."""

    def change(self, changes: StateChanges, columns: torch.Tensor) -> None:
        """Load, zero and poison states for the next step. `begin` follows, for those that it saves. `columns`: those of
        `changes` on the device."""
        self._changes = changes
        self._last = None
        if not columns.shape[1]:
            return
        slots, places = columns[1].long(), columns[3].long() + self._rows
        if changes.loads.stop > changes.loads.start:
            self._copy(slots[changes.loads], places[changes.loads])
        if changes.zeros.stop > changes.zeros.start:
            self._fill(slots[changes.zeros], 0.0)
        if changes.poisoned.stop > changes.poisoned.start:
            self._fill(places[changes.poisoned], math.nan)
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
            self._copy(places, slots)

    def mix(
        self, layer: int, x: torch.Tensor, convolution: Convolution, rule: Rule | None, *gates: torch.Tensor
    ) -> torch.Tensor:
        """Inputs of all tokens x [T, channels] to outputs [T, heads, value_dim], in float32 or the type of `x`; without
        a rule to those of the convolution, [T, channels]. `layer`: its number among the layers with states; `gates`:
        [T, …]."""
        inputs, matrices = self._inputs[layer], self._matrices[layer]
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
                outputs.append(self._mix_prompts(self._prompts, *rest, convolution, rule, inputs, matrices))
        else:
            outputs += self._mix_pieces(*rest, convolution, rule, inputs, matrices)
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
    ) -> torch.Tensor:
        from minisgl.kernels.attention.convolution_prefill_triton import convolve_prompts_cuda

        mixed = convolve_prompts_cuda(
            x, inputs, self._rows, of.slots, of.offsets, of.chunks, *convolution[:2], silu=convolution.silu
        )
        return mixed if rule is None else rule.prompts(mixed, gates, matrices, self._rows, of.slots, of.chunks)

    def _mix_pieces(
        self,
        x: torch.Tensor,
        gates: tuple[torch.Tensor, ...],
        convolution: Convolution,
        rule: Rule | None,
        inputs: torch.Tensor,
        matrices: torch.Tensor,
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
                place = self._rows + saved
                inputs[place], matrices[place] = inputs[slot], matrices[slot]

    def _copy(self, to: torch.Tensor, of: torch.Tensor) -> None:
        """Copy the states of all layers between places, both [N] int64."""
        # A few at a time: each of these copies needs as much memory again, which no step is known to have.
        for some, others in zip(to.split(_COPIED), of.split(_COPIED), strict=True):
            for states in (self._inputs, self._matrices):
                states[:, some] = states[:, others]

    def _fill(self, places: torch.Tensor, value: float) -> None:
        for states in (self._inputs, self._matrices):
            states.index_fill_(1, places, value)


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
