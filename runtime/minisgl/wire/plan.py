"""Plan of one engine step: the scheduler on rank 0 makes it, and all ranks execute plans in the same order.

A plan is one packed int32 buffer: one frame to a worker rank, and one copy to a GPU. Every change of a device table
(page table, sampling parameters, token ids) is part of a plan, so it cannot overtake a step that still reads or writes
the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]

SAMPLING_COLUMNS: Final = 7
"""slot, temperature (float bits), top_k, top_p (float bits), min_p (float bits), seed low, seed high."""

EMPTY: Final[IntArray] = np.empty(0, np.int32)
NO_UPDATES: Final[IntArray] = np.empty((3, 0), np.int32)
NO_ROWS: Final[IntArray] = np.empty((SAMPLING_COLUMNS, 0), np.int32)
NO_STATE_CHANGES: Final[IntArray] = np.empty((4, 0), np.int32)

_HEADER: Final = 18


class StateChange:
    """What a column of `StepPlan.state_changes` does. Plain ints, as the plan has them."""

    LOAD: Final = 0
    """The slot gets the state of a checkpoint, before the forward pass. Slots that are not in use are places of
    checkpoints with negative numbers. With n in each place, −1 to −n are those of the dummy row, and the next ones down
    those of the last slot."""
    ZERO: Final = 1
    """The slot gets the state before the first token, before the forward pass."""
    SAVE: Final = 2
    """A checkpoint gets the state behind the first tokens of the slot's sequence, the last of which the step
    computes."""
    POISON: Final = 3
    """The engine fills a checkpoint that was freed with NaN, after the loads of its step; only with audit."""
    MOVE: Final = 4
    """Instead of a slot, a checkpoint gets the state of another one, after the loads."""


class PlanError(ValueError):
    """A frame is not a valid plan of this wire version."""


class StepPlan(msgspec.Struct, frozen=True):
    """One step. All arrays are int32 views into `buffer`: D decode rows, P prefill segments, T prefill tokens,
    U page-table updates, N new rows, Z poisoned pages, C numbers of logits processors, X of shared prefixes, V updates
    of the page table of layers with a window, Y poisoned pages of these layers, K changes of recurrent states, W rows
    whose drafts are verified, H numbers of texts of new rows.

    Execution order within a step: poison, new rows' parameters, page-table updates, states that are loaded, then the
    forward pass, which saves states. In each layer the KV of *all* tokens of the step is stored before any attention
    reads it: a segment may start behind a prefix that another segment of the same step computes. With recurrent states
    it starts behind a checkpoint that an earlier step has saved.

    The input token of a decode row is the last one that the engine sampled for its slot. A step samples the next
    token of all decode rows and then of the prefill segments with `sample` set, in this order. Sampling for a row
    is keyed on (seed, p) where p is the number of tokens before the sampled one: `decode_positions + 1`, or
    `prefill_starts + prefill_lengths`.

    Where the engine speculates, a row may have several decode rows, one after the other: the first one has the row's
    last token, the others its drafts, which the engine has from the text so far. The engine knows where the row begins;
    the plan has the first position that it may have, as the result of the step before may not be known.
    """

    epoch: int
    step: int
    decode_slots: IntArray
    """[D] rows of the tables."""
    decode_positions: IntArray
    """[D] position of the input token: its KV is stored there; the row attends to positions 0..this. With `widths` the
    lowest that it may be."""
    prefill_slots: IntArray
    """[P]"""
    prefill_starts: IntArray
    """[P] first position computed: earlier positions are in the KV pool or stored in this step."""
    prefill_lengths: IntArray
    """[P] number of tokens computed, ≥ 1."""
    prefill_sample: IntArray
    """[P] 1: the segment ends its prompt, and a token is sampled after it."""
    prefill_tokens: IntArray
    """[T] token ids of the segments, one after the other."""
    page_updates: IntArray
    """[3, U] slot, index in the slot's page table, page."""
    new_rows: IntArray
    """[SAMPLING_COLUMNS, N] sampling parameters of the rows that join in this step."""
    poison_pages: IntArray
    """[Z] pages freed since the last plan; only with audit. The engine fills them with NaN."""
    logits_processors: IntArray
    """[C] penalties, biases, masks and log-probability requests of some of the new rows;
    `logits_processors.decode_logits_processors` reads it."""
    shared_prefixes: IntArray
    """[X] decode rows whose first pages are the same; `shared_prefixes.decode_prefixes` reads it."""
    second_texts: IntArray
    """[P] index of the first token of each segment's second text, 0 where there is one text; empty: there is one in
    all of them."""
    window_updates: IntArray
    """[3, V] as `page_updates`, for layers with a window, whose pages are others. Entries of pages behind the window
    are stale: no layer may read them."""
    poison_window_pages: IntArray
    """[Y] as `poison_pages`, for layers with a window."""
    state_changes: IntArray
    """[4, K] StateChange, slot, number of tokens, checkpoint; of a poisoned checkpoint only the last one counts."""
    widths: IntArray
    """[W] number of decode rows of each row, D in all; empty: the engine does not speculate, or there are none."""
    texts: IntArray
    """[H] texts of the rows that join, in which drafts are found; `row_texts.decode_texts` reads it."""
    buffer: IntArray

    @property
    def sampled_slots(self) -> IntArray:
        """[S] slots whose tokens the step returns, in the order of the result."""
        if not len(self.prefill_slots):
            return self.decode_slots
        return np.concatenate((self.decode_slots, self.prefill_slots[self.prefill_sample == 1]))

    def encode(self) -> bytes:
        """The plan as one frame."""
        return self.buffer.tobytes()

    @staticmethod
    def build(
        *,
        epoch: int,
        step: int,
        decode_slots: IntArray = EMPTY,
        decode_positions: IntArray = EMPTY,
        prefill_slots: IntArray = EMPTY,
        prefill_starts: IntArray = EMPTY,
        prefill_lengths: IntArray = EMPTY,
        prefill_sample: IntArray = EMPTY,
        prefill_tokens: IntArray = EMPTY,
        page_updates: IntArray = NO_UPDATES,
        new_rows: IntArray = NO_ROWS,
        poison_pages: IntArray = EMPTY,
        logits_processors: IntArray = EMPTY,
        shared_prefixes: IntArray = EMPTY,
        second_texts: IntArray = EMPTY,
        window_updates: IntArray = NO_UPDATES,
        poison_window_pages: IntArray = EMPTY,
        state_changes: IntArray = NO_STATE_CHANGES,
        widths: IntArray = EMPTY,
        texts: IntArray = EMPTY,
    ) -> StepPlan:
        """Pack the arrays, whose shapes are those of the fields."""
        sizes = (
            len(decode_slots),
            len(prefill_slots),
            len(prefill_tokens),
            page_updates.shape[1],
            new_rows.shape[1],
            len(poison_pages),
            len(logits_processors),
            len(shared_prefixes),
            len(second_texts),
            window_updates.shape[1],
            len(poison_window_pages),
            state_changes.shape[1],
            len(widths),
            len(texts),
        )
        parts = (
            (epoch & 0x7FFFFFFF, epoch >> 31, step & 0x7FFFFFFF, step >> 31, *sizes),
            decode_slots,
            decode_positions,
            prefill_slots,
            prefill_starts,
            prefill_lengths,
            prefill_sample,
            prefill_tokens,
            page_updates.ravel(),
            new_rows.ravel(),
            poison_pages,
            logits_processors,
            shared_prefixes,
            second_texts,
            window_updates.ravel(),
            poison_window_pages,
            state_changes.ravel(),
            widths,
            texts,
        )
        return StepPlan._view(np.concatenate(parts, dtype=np.int32, casting="same_kind"), epoch, step, sizes)

    @staticmethod
    def decode(frame: bytes | memoryview) -> StepPlan:
        """The plan in a frame. Raises PlanError when the frame's sizes do not add up."""
        if len(frame) < _HEADER * 4 or len(frame) % 4:
            raise PlanError(f"a plan of {len(frame)} bytes is truncated")
        buffer = np.frombuffer(frame, np.int32)
        epoch_low, epoch_high, step_low, step_high, *sizes = buffer[:_HEADER].tolist()
        if min(sizes) < 0:
            raise PlanError("a size in a plan's header is negative")
        return StepPlan._view(buffer, epoch_low | epoch_high << 31, step_low | step_high << 31, sizes)

    @staticmethod
    def _view(buffer: IntArray, epoch: int, step: int, sizes: Sequence[int]) -> StepPlan:
        d, p, t, u, n, z, c, x, s, v, y, k, w, h = sizes
        arrays, start = [], _HEADER
        for length in (d, d, p, p, p, p, t, 3 * u, SAMPLING_COLUMNS * n, z, c, x, s, 3 * v, y, 4 * k, w, h):
            arrays.append(buffer[start : start + length])
            start += length
        if start != len(buffer):
            raise PlanError("the sizes in a plan's header do not add up to its length")
        arrays[7], arrays[8] = arrays[7].reshape(3, u), arrays[8].reshape(SAMPLING_COLUMNS, n)
        arrays[13], arrays[15] = arrays[13].reshape(3, v), arrays[15].reshape(4, k)
        arrays.append(buffer)
        return StepPlan(epoch, step, *arrays)


def runs(lengths: IntArray) -> tuple[IntArray, IntArray]:
    """For runs of these `lengths` [N] that follow each other: index of the first element of each [N], and place of each
    element in its run [sum of `lengths`]."""
    first = lengths.cumsum(dtype=np.int32) - lengths
    return first, np.arange(lengths.sum(), dtype=np.int32) - np.repeat(first, lengths)


class LogprobColumns(msgspec.Struct, frozen=True):
    """Log-probabilities of the raw distribution at N positions, with the K most likely tokens of each, best first."""

    chosen: FloatArray
    """[N]"""
    top_ids: IntArray
    """[N, K]"""
    top: FloatArray
    """[N, K]"""

    def __getitem__(self, part: slice) -> LogprobColumns:
        return LogprobColumns(self.chosen[part], self.top_ids[part], self.top[part])


class RowLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of sampled tokens, for the rows that report them."""

    rows: IntArray
    """[N] indices into `StepResult.tokens`."""
    columns: LogprobColumns
    """K is the largest number that any row of the step wants."""


class PromptLogprobPart(msgspec.Struct, frozen=True):
    """Log-probabilities of the prompt tokens `start`, `start + 1`, … of one row."""

    slot: int
    start: int
    columns: LogprobColumns


class VerifiedRows(msgspec.Struct, frozen=True):
    """What became of the drafts of a step's R rows: the decode rows of `StepPlan.widths`, then the segments that
    sample."""

    counts: IntArray
    """[R] tokens that count, of those that the step has sampled for the row: 1 and the accepted drafts."""
    offered: IntArray
    """[R] drafts that the row had, also if its width left no place for them."""
    hits: IntArray
    """[R] 1 where the first draft was the sampled token, also if it was not verified."""
    predicted: IntArray
    """[R] 1 where the drafts came from the text that the request predicted."""


class StepResult(msgspec.Struct, frozen=True):
    """Result of one step. `tokens` [S] int32 in the order of `StepPlan.sampled_slots`; −1 where the logits were not
    finite: that request ends with an error, the others continue."""

    step: int
    tokens: IntArray
    logprobs: RowLogprobs | None = None
    prompt_logprobs: tuple[PromptLogprobPart, ...] = ()
    pooled: FloatArray | None = None
    """[S, size] of a model that does not generate; `tokens` has 0 then, or −1."""
    verified: VerifiedRows | None = None
    """Of an engine that speculates."""
