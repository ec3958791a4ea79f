"""Logits processors on the host: the table of rows that have any, and the work of one step for them.

Everything that a step needs is packed into its one buffer of inputs. The host knows positions ahead of the device, and
therefore how many tokens a row has generated; the tokens themselves are counted on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from minisgl.wire.logits_processors import RowLogitsProcessors, decode_logits_processors
from minisgl.wire.plan import EMPTY, IntArray, LogprobColumns, PromptLogprobPart, RowLogprobs, StepPlan


class DeviceLogitsProcessors(NamedTuple):
    """int32 views into the step's buffer; S rows sample in the step, and the logits of C of them are changed."""

    joined: torch.Tensor
    """Slots of joining rows with penalties: token counts of earlier rows in these slots are dropped."""
    prompt_slots: torch.Tensor
    prompt_tokens: torch.Tensor
    output_slots: torch.Tensor
    output_tokens: torch.Tensor
    changed: torch.Tensor
    """[C] indices into the S rows; rows with top-k, top-p or min-p are the last."""
    bias_rows: torch.Tensor
    """Indices into the C rows, as `penalized_rows` and `masked_rows`."""
    bias_ids: torch.Tensor
    bias_values: torch.Tensor
    """float bits"""
    penalized_rows: torch.Tensor
    penalized_slots: torch.Tensor
    penalties: torch.Tensor
    """Repetition of each penalized row, then frequency, then presence; float bits"""
    masked_rows: torch.Tensor
    masked_ids: torch.Tensor
    logprob_rows: torch.Tensor
    """Indices into the S rows: rows that report log-probabilities."""
    prompt_rows: torch.Tensor
    """Indices into the step's T tokens: a log-probability of the prompt token after each of them is reported."""
    prompt_next: torch.Tensor
    """The prompt tokens after them."""
    unfiltered: int
    """Number of the C rows without top-k, top-p and min-p."""
    tops: int
    """K: the largest number of most likely tokens that any row reports."""


_ARRAYS = DeviceLogitsProcessors._fields[:-2]


class PromptSegment(NamedTuple):
    """Prompt tokens of one row whose log-probabilities a step reports."""

    slot: int
    start: int
    """Index of the first of these tokens in the prompt."""
    rows: IntArray
    """Indices into the step's T tokens: those before them."""
    tokens: IntArray
    tops: int


class StepLogitsProcessors:
    """Work of one step for rows with logits processors or log-probabilities, on the host."""

    def __init__(
        self, arrays: dict[str, IntArray], prompts: list[PromptSegment], *, unfiltered: int, tops: int
    ) -> None:
        """Fields of `DeviceLogitsProcessors`, its tensors as `arrays`. `prompts`: in the order of `prompt_rows`."""
        self._parts = [arrays[name] for name in _ARRAYS]
        self._prompts = prompts
        self._logprob_rows = arrays["logprob_rows"]
        self.changed = arrays["changed"]
        """[C] indices into the S rows."""
        self._unfiltered = unfiltered
        self._tops = tops

    def packed(self) -> IntArray:
        return np.concatenate(self._parts, dtype=np.int32, casting="same_kind")

    def view(self, buffer: torch.Tensor) -> DeviceLogitsProcessors:
        tensors = torch.split(buffer, [len(part) for part in self._parts])
        return DeviceLogitsProcessors._make((*tensors, self._unfiltered, self._tops))

    def unpack(self, report: IntArray) -> tuple[RowLogprobs | None, tuple[PromptLogprobPart, ...]]:
        """`report` [N, 1 + 2 K], as `logprobs.report` returns it: the sampled rows, then the prompts' tokens."""
        tops = (report.shape[1] - 1) // 2
        values = report.view(np.float32)
        columns = LogprobColumns(values[:, 0], report[:, 1 : 1 + tops], values[:, 1 + tops :])
        first = len(self._logprob_rows)
        rows = RowLogprobs(self._logprob_rows, columns[:first]) if first else None
        parts = []
        for prompt in self._prompts:
            parts.append(PromptLogprobPart(prompt.slot, prompt.start, columns[first : first + len(prompt.rows)]))
            first += len(prompt.rows)
        return rows, tuple(parts)


class LogitsProcessorTable:
    """Logits processors of the rows that have any, by slot. Only plans change it, in their order."""

    def __init__(self) -> None:
        self._rows: dict[int, RowLogitsProcessors] = {}

    def select(self, plan: StepPlan, sampled_slots: IntArray, filtered: IntArray) -> StepLogitsProcessors | None:
        """Apply the plan's changes and return the work of its step, or None. Call it once per plan.

        `filtered`: indices of the sampled rows with top-k, top-p or min-p.
        """
        joined = self._join(plan) if self._rows or len(plan.logits_processors) else []
        if not self._rows:
            return None
        sampled = [(row, self._rows[slot]) for row, slot in enumerate(sampled_slots.tolist()) if slot in self._rows]
        if not (joined or sampled or len(plan.prefill_slots)):
            # All rows with processors have ended, and no other request has their slots yet.
            return None
        changed = _changed(sampled, _sampled_positions(plan), set(filtered.tolist()))
        prompts = list(self._prompts(plan))
        reporting = {row: processors.logprobs for row, processors in sampled if processors.logprobs >= 0}
        arrays = _history(joined) | _changes(changed)
        arrays["logprob_rows"] = np.array(list(reporting), np.int32)
        arrays["prompt_rows"] = _joined(prompt.rows for prompt in prompts)
        arrays["prompt_next"] = _joined(prompt.tokens for prompt in prompts)
        if not any(map(len, arrays.values())):
            return None
        tops = max([*reporting.values(), *(prompt.tops for prompt in prompts)], default=0)
        unfiltered = sum(not change.filtered for change in changed)
        return StepLogitsProcessors(arrays, prompts, unfiltered=unfiltered, tops=tops)

    def reports_prompts(self, plan: StepPlan) -> bool:
        """Whether a step may report log-probabilities of prompt tokens. Call it before `select`."""
        if not len(plan.prefill_slots) or not (self._rows or len(plan.logits_processors)):
            return False
        rows = [self._rows[slot] for slot in plan.prefill_slots.tolist() if slot in self._rows]
        return any(row.prompt_logprobs >= 0 for row in (*rows, *decode_logits_processors(plan.logits_processors)))

    def _join(self, plan: StepPlan) -> list[RowLogitsProcessors]:
        for slot in plan.new_rows[0].tolist():
            self._rows.pop(slot, None)
        joined = decode_logits_processors(plan.logits_processors)
        self._rows.update((processors.slot, processors) for processors in joined)
        return joined

    def _prompts(self, plan: StepPlan) -> Iterator[PromptSegment]:
        offset = len(plan.decode_slots)
        segments = (plan.prefill_slots, plan.prefill_starts, plan.prefill_lengths)
        for slot, start, length in zip(*(column.tolist() for column in segments), strict=True):
            row = self._rows.get(slot)
            if row is not None and row.prompt_logprobs >= 0:
                first = max(start + 1, row.prompt_logprobs_from)
                tokens = row.prompt[first : start + length + 1]
                if len(tokens):
                    rows = np.arange(len(tokens), dtype=np.int32) + np.int32(offset + first - 1 - start)
                    yield PromptSegment(slot, first, rows, tokens, row.prompt_logprobs)
            offset += length


class _Change(NamedTuple):
    """Ordered as `DeviceLogitsProcessors.changed`."""

    filtered: bool
    row: int
    processors: RowLogitsProcessors
    masks: bool


def _changed(sampled: list[tuple[int, RowLogitsProcessors]], positions: IntArray, filtered: set[int]) -> list[_Change]:
    """Sampled rows whose logits change; `positions` [S] counts the tokens before each sampled one."""
    changes = []
    for row, processors in sampled:
        generated = int(positions[row]) - processors.prompt_length
        masks = generated < processors.min_tokens and len(processors.masked_ids) > 0
        if masks or processors.penalized or len(processors.bias_ids):
            changes.append(_Change(row in filtered, row, processors, masks))
    return sorted(changes, key=lambda change: change[:2])


def _history(joined: list[RowLogitsProcessors]) -> dict[str, IntArray]:
    """Tokens that the penalties of joining rows count from the start."""
    penalized = [row for row in joined if row.penalized]
    return {
        "joined": np.array([row.slot for row in penalized], np.int32),
        "prompt_slots": _repeated((row.slot, row.prompt) for row in penalized),
        "prompt_tokens": _joined(row.prompt for row in penalized),
        "output_slots": _repeated((row.slot, row.output) for row in penalized),
        "output_tokens": _joined(row.output for row in penalized),
    }


def _changes(changed: list[_Change]) -> dict[str, IntArray]:
    rows = [change.processors for change in changed]
    penalized = [(index, row) for index, row in enumerate(rows) if row.penalized]
    masking = [(index, change.processors.masked_ids) for index, change in enumerate(changed) if change.masks]
    penalties = np.array([(row.repetition, row.frequency, row.presence) for _, row in penalized], np.float32)
    return {
        "changed": np.array([change.row for change in changed], np.int32),
        "bias_rows": _repeated((index, row.bias_ids) for index, row in enumerate(rows)),
        "bias_ids": _joined(row.bias_ids for row in rows),
        "bias_values": _joined(row.bias_values.view(np.int32) for row in rows),
        "penalized_rows": np.array([index for index, _ in penalized], np.int32),
        "penalized_slots": np.array([row.slot for _, row in penalized], np.int32),
        "penalties": penalties.ravel(order="F").view(np.int32),
        "masked_rows": _repeated(masking),
        "masked_ids": _joined(ids for _, ids in masking),
    }


def _sampled_positions(plan: StepPlan) -> IntArray:
    """[S] number of tokens before the sampled one."""
    ends = plan.prefill_starts + plan.prefill_lengths
    return np.concatenate((plan.decode_positions + np.int32(1), ends[plan.prefill_sample == 1]))


def _joined(arrays: Iterable[IntArray]) -> IntArray:
    return np.concatenate((EMPTY, *arrays))


def _repeated(lists: Iterable[tuple[int, IntArray]]) -> IntArray:
    """Each number once for every element of its array."""
    pairs = [(number, len(array)) for number, array in lists]
    numbers, counts = np.array(pairs, np.int32).reshape(-1, 2).T
    return np.repeat(numbers, counts)
