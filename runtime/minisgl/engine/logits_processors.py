"""Filters, logits processors and log-probabilities on the host: which rows need what, and the changes when rows join.

A row's parameters go to tables of the device in the plan in which it joins. After that, the host only looks up by slot
which stages the rows of a step need; the device counts tokens and compares positions itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from minisgl.kernels.sampling import sampling_rows as columns
from minisgl.wire.logits_processors import RowLogitsProcessors, decode_logits_processors
from minisgl.wire.plan import (
    EMPTY,
    SAMPLING_COLUMNS,
    IntArray,
    LogprobColumns,
    PromptLogprobPart,
    RowLogprobs,
    StepPlan,
)

NEW_ROW_COLUMNS: Final = 1 + columns.COLUMNS
"""Slot, then the columns of the device's table."""

MANY_TOPS: Final = 1 << 16
"""Stage of rows that report more most likely tokens than the kernel can, or other tokens; only the host knows it."""

LISTS: Final = columns.BIASED | columns.MASKED | columns.BITMASKED
"""Stages that read lists or bitmasks."""


class DeviceChanges(NamedTuple):
    """int32 views into the step's buffer: changes of the tables by rows that join, and prompt tokens to report."""

    list_slots: torch.Tensor
    """[L] slot of each entry of a list"""
    list_index: torch.Tensor
    list_ids: torch.Tensor
    list_values: torch.Tensor
    counted: torch.Tensor
    """Slots of joining rows with penalties: token counts of earlier rows in these slots are dropped."""
    count_slots: torch.Tensor
    """[H] slot of each distinct token of their histories"""
    count_tokens: torch.Tensor
    counts: torch.Tensor
    prompt_rows: torch.Tensor
    """Indices into the step's T tokens: a log-probability of the prompt token after each of them is reported."""
    prompt_next: torch.Tensor
    """The prompt tokens after them."""
    longest_list: int
    prompt_tops: int
    """Largest number of most likely tokens that any prompt reports."""


_ARRAYS = DeviceChanges._fields[:-2]


class PromptSegment(NamedTuple):
    """Prompt tokens of one row whose log-probabilities a step reports."""

    slot: int
    start: int
    """Index of the first of these tokens in the prompt."""
    rows: IntArray
    """Indices into the step's T tokens: those before them."""
    tokens: IntArray
    tops: int


class StepProcessors(NamedTuple):
    """Work of one step for rows with filters, logits processors or log-probabilities, on the host."""

    stages: int = 0
    """Bits of the stages that any sampled row needs."""
    rows: IntArray = EMPTY
    """Indices into the S sampled rows: those with a stage."""
    reported: IntArray = EMPTY
    """Rows that report log-probabilities."""
    tops: int = 0
    """Largest number of most likely tokens that any of these reports."""
    named: IntArray = EMPTY
    """[N × tops] tokens that these report in place of the most likely ones, −1 where there are none; empty if no row
    has any."""
    late_slots: IntArray = EMPTY
    """Slots of the constrained rows, in the order of the sampled rows."""
    changes: tuple[IntArray, ...] = ()
    """Arrays of `DeviceChanges`."""
    longest_list: int = 0
    prompts: Sequence[PromptSegment] = ()

    @property
    def lists(self) -> bool:
        return bool(self.stages & LISTS)

    def packed(self) -> IntArray:
        """The part of the step's buffer that `view` reads."""
        return np.concatenate(self.changes, dtype=np.int32, casting="same_kind") if self.changes else EMPTY

    def view(self, buffer: torch.Tensor) -> DeviceChanges | None:
        if not self.changes:
            return None
        tensors = torch.split(buffer, [len(part) for part in self.changes])
        tops = max((prompt.tops for prompt in self.prompts), default=0)
        return DeviceChanges._make((*tensors, self.longest_list, tops))

    def unpack(
        self, report: IntArray | None, prompt_report: IntArray | None
    ) -> tuple[RowLogprobs | None, tuple[PromptLogprobPart, ...]]:
        """Log-probabilities of the step. `report` [S, 1 + 2 K] and `prompt_report` [N, 1 + 2 K] as `logprobs.report`
        returns them."""
        rows = None if report is None else RowLogprobs(self.reported, _columns(report[self.reported], self.tops))
        parts, first = [], 0
        if prompt_report is not None:
            values = _columns(prompt_report, (prompt_report.shape[1] - 1) // 2)
            for prompt in self.prompts:
                parts.append(PromptLogprobPart(prompt.slot, prompt.start, values[first : first + len(prompt.rows)]))
                first += len(prompt.rows)
        return rows, tuple(parts)


_NOTHING = StepProcessors()


class LogitsProcessorTable:
    """Parameters of the rows by slot, as the device has them. Only plans change it, in their order."""

    def __init__(self, rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._table = np.zeros((columns.COLUMNS, rows), np.int32)
        self._stages = np.zeros(rows, np.int32)
        self._prompts: dict[int, RowLogitsProcessors] = {}
        """Rows that report log-probabilities of their prompts."""
        self._named: dict[int, IntArray] = {}
        """Tokens by slot that rows report in place of the most likely ones."""
        self._newest: tuple[IntArray, list[RowLogitsProcessors]] = EMPTY, []
        """Rows that joined in the newest plan, encoded and decoded."""
        self._last_slots: bytes | None = None
        """Slots of the last step, if no row joined in it and none of them depends on its position."""
        self._last = _NOTHING
        """Its work, which is the same for each step of these slots."""

    def new_rows(self, slots: IntArray) -> IntArray:
        """[NEW_ROW_COLUMNS, N]: `slots` [N] and their columns of the table, for the device."""
        return np.concatenate((slots[None], self._table[:, slots]))

    def select(self, plan: StepPlan, slots: IntArray, positions: IntArray) -> StepProcessors:
        """Apply the plan's changes and return the work of its step. Call it once per plan.

        `slots` and `positions` [S] are those of the sampled rows; a position counts the tokens before the sampled one.
        """
        if len(plan.prefill_slots) or plan.new_rows.shape[1]:
            self._last_slots = None
            return self._select(plan, slots, positions)
        key = slots.tobytes()
        if key != self._last_slots:
            self._last = self._select(plan, slots, positions)
            # Masks of `min_tokens` end at a position.
            depends = np.bitwise_or.reduce(self._stages[slots]) & columns.MASKED
            self._last_slots = None if depends else key
        return self._last

    def _select(self, plan: StepPlan, slots: IntArray, positions: IntArray) -> StepProcessors:
        """`select` for a step whose rows are others than those of the last one, or depend on their positions."""
        joined = self._join(plan) if plan.new_rows.shape[1] else []
        prompts = list(self._segments(plan)) if self._prompts and len(plan.prefill_slots) else []
        found = self._stages[slots]
        stages = int(np.bitwise_or.reduce(found))
        if not (stages or joined or prompts):
            return _NOTHING
        if stages & columns.MASKED:
            ended = positions >= self._table[columns.MASK_UNTIL, slots]
            found = np.where(ended, found & ~columns.MASKED, found)
            stages = int(np.bitwise_or.reduce(found))
        reported, tops, named = EMPTY, 0, EMPTY
        if stages & (columns.REPORTED | MANY_TOPS):
            reported = np.flatnonzero(found & (columns.REPORTED | MANY_TOPS)).astype(np.int32)
            tops = int(self._table[columns.TOPS, slots[reported]].max())
            if self._named:
                named = self._named_of(slots[reported].tolist(), tops)
        return StepProcessors(
            stages,
            np.flatnonzero(found).astype(np.int32),
            reported,
            tops,
            named,
            slots[found & columns.BITMASKED > 0] if stages & columns.BITMASKED else EMPTY,
            _changes(joined, prompts) if joined or prompts else (),
            max((len(row.bias_ids) + len(row.masked_ids) for row in joined), default=0),
            prompts,
        )

    def reports_prompts(self, plan: StepPlan) -> bool:
        """Whether a step may report log-probabilities of prompt tokens. Call it before `select`."""
        if not len(plan.prefill_slots) or not (self._prompts or len(plan.logits_processors)):
            return False
        if any(slot in self._prompts for slot in plan.prefill_slots.tolist()):
            return True
        return any(row.prompt_logprobs >= 0 for row in self._decoded(plan))

    def _join(self, plan: StepPlan) -> list[RowLogitsProcessors]:
        slots = plan.new_rows[0]
        assert SAMPLING_COLUMNS - 1 == columns.STAGES
        self._table[: columns.STAGES, slots] = plan.new_rows[1:]
        self._table[columns.STAGES :, slots] = 0
        _, temperature, top_k, top_p, min_p = plan.new_rows[:5]
        filters = (top_k > 0) & (top_k < self._vocab_size)
        filters |= (top_p.view(np.float32) < 1) | (min_p.view(np.float32) > 0)
        filters &= temperature.view(np.float32) > 0
        self._stages[slots] = self._table[columns.STAGES, slots] = columns.FILTERED * filters
        for slot in slots.tolist() if self._prompts or self._named else ():
            self._prompts.pop(slot, None)
            self._named.pop(slot, None)
        joined = self._decoded(plan)
        for row in joined:
            self._set(row)
        return joined

    def _decoded(self, plan: StepPlan) -> list[RowLogitsProcessors]:
        encoded, rows = self._newest
        if encoded is not plan.logits_processors:
            rows = decode_logits_processors(plan.logits_processors)
            self._newest = plan.logits_processors, rows
        return rows

    def _set(self, row: RowLogitsProcessors) -> None:
        column = self._table[:, row.slot]
        bits = (
            (columns.PENALIZED, row.penalized),
            (columns.BIASED, len(row.bias_ids)),
            (columns.MASKED, len(row.masked_ids) and row.min_tokens > 0),
            (columns.BITMASKED, row.late),
            (columns.REPORTED, 0 <= row.logprobs <= columns.MOST_TOPS and not len(row.logprob_ids)),
        )
        stages = int(column[columns.STAGES]) | sum(bit for bit, needed in bits if needed)
        column[columns.STAGES] = stages
        many = row.logprobs > columns.MOST_TOPS or len(row.logprob_ids)
        self._stages[row.slot] = stages | (MANY_TOPS if many else 0)
        if len(row.logprob_ids):
            self._named[row.slot] = row.logprob_ids
        penalties = np.array((row.repetition, row.frequency, row.presence), np.float32)
        column[columns.REPETITION : columns.PRESENCE + 1] = penalties.view(np.int32)
        column[columns.MASK_UNTIL] = row.prompt_length + row.min_tokens
        column[columns.BIASES] = len(row.bias_ids)
        column[columns.MASKS] = len(row.masked_ids)
        column[columns.TOPS] = row.logprobs
        if row.prompt_logprobs >= 0:
            self._prompts[row.slot] = row

    def _named_of(self, slots: Sequence[int], tops: int) -> IntArray:
        """`StepProcessors.named` of the rows in these slots."""
        if not any(slot in self._named for slot in slots):
            return EMPTY
        named = np.full((len(slots), tops), -1, np.int32)
        for row, slot in enumerate(slots):
            ids = self._named.get(slot, EMPTY)
            named[row, : len(ids)] = ids
        return named.ravel()

    def _segments(self, plan: StepPlan) -> Iterator[PromptSegment]:
        offset = len(plan.decode_slots)
        segments = (plan.prefill_slots, plan.prefill_starts, plan.prefill_lengths)
        for slot, start, length in zip(*(column.tolist() for column in segments), strict=True):
            row = self._prompts.get(slot)
            if row is not None:
                first = max(start + 1, row.prompt_logprobs_from)
                tokens = row.prompt[first : start + length + 1]
                if len(tokens):
                    rows = np.arange(len(tokens), dtype=np.int32) + np.int32(offset + first - 1 - start)
                    yield PromptSegment(slot, first, rows, tokens, row.prompt_logprobs)
            offset += length


def _columns(report: IntArray, tops: int) -> LogprobColumns:
    """Columns of `report` [N, 1 + 2 K] with the first `tops` of its K most likely tokens."""
    most = (report.shape[1] - 1) // 2
    tops = min(tops, most)
    values = report.view(np.float32)
    return LogprobColumns(values[:, 0], report[:, 1 : 1 + tops], values[:, 1 + most : 1 + most + tops])


def _changes(joined: Sequence[RowLogitsProcessors], prompts: Sequence[PromptSegment]) -> tuple[IntArray, ...]:
    lists = [(row.slot, *_entries(row)) for row in joined if len(row.bias_ids) or len(row.masked_ids)]
    penalized = [row for row in joined if row.penalized]
    histories = [(row.slot, *_history(row)) for row in penalized]
    arrays = {
        "list_slots": _repeated((slot, ids) for slot, ids, _ in lists),
        "list_index": _joined(np.arange(len(ids), dtype=np.int32) for _, ids, _ in lists),
        "list_ids": _joined(ids for _, ids, _ in lists),
        "list_values": _joined(values for _, _, values in lists),
        "counted": np.array([row.slot for row in penalized], np.int32),
        "count_slots": _repeated((slot, tokens) for slot, tokens, _ in histories),
        "count_tokens": _joined(tokens for _, tokens, _ in histories),
        "counts": _joined(counts for _, _, counts in histories),
        "prompt_rows": _joined(prompt.rows for prompt in prompts),
        "prompt_next": _joined(prompt.tokens for prompt in prompts),
    }
    return tuple(arrays[name] for name in _ARRAYS)


def _entries(row: RowLogitsProcessors) -> tuple[IntArray, IntArray]:
    """Ids and values of the row's list, as `ProcessorTables.lists` has them."""
    order = np.argsort(row.bias_ids)
    ids = np.concatenate((row.bias_ids[order], np.sort(row.masked_ids)))
    return ids, np.concatenate((row.bias_values.view(np.int32)[order], np.zeros_like(row.masked_ids)))


def _history(row: RowLogitsProcessors) -> tuple[IntArray, IntArray]:
    """The row's distinct tokens and their entries of `ProcessorTables.counts`."""
    tokens, index = np.unique(np.concatenate((row.prompt, row.output)), return_inverse=True)
    generated = np.bincount(index[len(row.prompt) :], minlength=len(tokens))
    counts = columns.GENERATED * np.minimum(generated, columns.MOST_GENERATED)
    counts[index[: len(row.prompt)]] += columns.IN_PROMPT
    return tokens, counts.astype(np.int32)


def _joined(arrays: Iterable[IntArray]) -> IntArray:
    return np.concatenate((EMPTY, *arrays))


def _repeated(lists: Iterable[tuple[int, IntArray]]) -> IntArray:
    """Each number once for every element of its array."""
    pairs = [(number, len(array)) for number, array in lists]
    numbers, counts = np.array(pairs, np.int32).reshape(-1, 2).T
    return np.repeat(numbers, counts)
