"""The host's side of rows with controls: which of them change their logits or report log-probabilities in a step.

All that a step needs is packed into its one buffer of inputs. Positions are known on the host ahead of the device, so
how many tokens a row has generated is, too; the tokens themselves are counted on the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from minisgl.wire.plan import IntArray, LogprobColumns, PromptPart, RowLogprobs, StepPlan
from minisgl.wire.row_controls import RowControls, decode_controls

_NONE = np.empty(0, np.int32)


class DeviceControls(NamedTuple):
    """int32 views into the step's buffer. C rows of the step's S change their logits."""

    joined: torch.Tensor
    """Slots with penalties that join: what was counted there before is another row's."""
    prompt_slots: torch.Tensor
    prompt_tokens: torch.Tensor
    output_slots: torch.Tensor
    output_tokens: torch.Tensor
    changed: torch.Tensor
    """[C] of the S rows; those with top-k, top-p or min-p are the last."""
    bias_rows: torch.Tensor
    """Of the C rows, as in the other `…_rows` that follow."""
    bias_ids: torch.Tensor
    bias_values: torch.Tensor
    """float bits"""
    penalised_rows: torch.Tensor
    penalised_slots: torch.Tensor
    repetition: torch.Tensor
    """float bits, as the two others"""
    frequency: torch.Tensor
    presence: torch.Tensor
    masked_rows: torch.Tensor
    masked_ids: torch.Tensor
    report_rows: torch.Tensor
    """Of the S rows that report log-probabilities."""
    prompt_rows: torch.Tensor
    """Of the step's T tokens: those after which a prompt token's log-probability is reported."""
    prompt_next: torch.Tensor
    """The prompt tokens that follow them."""


class StepControls:
    """What one step does for its rows with controls."""

    def __init__(
        self,
        arrays: dict[str, IntArray],
        *,
        unfiltered: int,
        tops: int,
        prompt_parts: list[tuple[int, int, int]],
    ) -> None:
        """`prompt_parts`: slot, index of the first prompt token and count, in the order of `prompt_rows`."""
        self._parts = [arrays[name] for name in DeviceControls._fields]
        self.unfiltered = unfiltered
        """How many of the C rows have neither top-k, top-p nor min-p."""
        self.tops = tops
        """K: the most likeliest tokens that any row reports."""
        self.changed = arrays["changed"]
        """[C] of the S rows."""
        self._report_rows = arrays["report_rows"]
        self._prompt_parts = prompt_parts

    def packed(self) -> IntArray:
        return np.concatenate(self._parts, dtype=np.int32, casting="same_kind")

    def view(self, buffer: torch.Tensor) -> DeviceControls:
        return DeviceControls(*torch.split(buffer, [len(part) for part in self._parts]))

    def unpack(self, report: IntArray) -> tuple[RowLogprobs | None, tuple[PromptPart, ...]]:
        """`report` [N, 1 + 2 K], as `logprobs.report` returns it: the sampled rows, then the prompts' tokens."""
        tops = (report.shape[1] - 1) // 2
        values = report.view(np.float32)
        columns = LogprobColumns(values[:, 0], report[:, 1 : 1 + tops], values[:, 1 + tops :])
        first = len(self._report_rows)
        rows = RowLogprobs(self._report_rows, columns[:first]) if first else None
        parts = []
        for slot, start, count in self._prompt_parts:
            parts.append(PromptPart(slot, start, columns[first : first + count]))
            first += count
        return rows, tuple(parts)


class ControlRows:
    """The controls of the rows that have any, by slot. Changed only by plans, in their order."""

    def __init__(self) -> None:
        self._rows: dict[int, RowControls] = {}

    def select(self, plan: StepPlan, sampled_slots: IntArray, filtered: IntArray) -> StepControls | None:
        """Once per plan. `filtered`: those of the sampled rows with top-k, top-p or min-p. None: nothing to do."""
        joined = self._join(plan) if self._rows or len(plan.controls) else []
        if not self._rows:
            return None
        sampled = [(row, self._rows[slot]) for row, slot in enumerate(sampled_slots.tolist()) if slot in self._rows]
        if not (joined or sampled or len(plan.prefill_slots)):
            # All of them have ended, and nobody has taken their slots yet.
            return None
        arrays = _history(joined)
        unfiltered = _changes(sampled, _sampled_positions(plan), set(filtered.tolist()), arrays)
        reporting = [row for row, controls in sampled if controls.logprobs >= 0]
        arrays["report_rows"] = np.array(reporting, np.int32)
        tops = [controls.logprobs for _, controls in sampled]
        prompt_parts = self._prompts(plan, arrays, tops)
        if not any(map(len, arrays.values())):
            return None
        return StepControls(arrays, unfiltered=unfiltered, tops=max(tops, default=0), prompt_parts=prompt_parts)

    def _join(self, plan: StepPlan) -> list[RowControls]:
        for slot in plan.new_rows[0].tolist():
            self._rows.pop(slot, None)
        joined = decode_controls(plan.controls)
        self._rows.update((controls.slot, controls) for controls in joined)
        return joined

    def _prompts(self, plan: StepPlan, arrays: dict[str, IntArray], tops: list[int]) -> list[tuple[int, int, int]]:
        parts, rows, following = [], [], []
        offset = len(plan.decode_slots)
        segments = (plan.prefill_slots, plan.prefill_starts, plan.prefill_lengths)
        for slot, start, length in zip(*(column.tolist() for column in segments), strict=True):
            controls = self._rows.get(slot)
            if controls is not None and controls.prompt_logprobs >= 0:
                first = max(start + 1, controls.prompt_logprobs_from)
                count = min(start + length + 1, controls.prompt_length) - first
                if count > 0:
                    parts.append((slot, first, count))
                    rows.append(np.arange(count) + (offset + first - 1 - start))
                    following.append(controls.prompt[first : first + count])
                    tops.append(controls.prompt_logprobs)
            offset += length
        arrays["prompt_rows"] = _joined(rows)
        arrays["prompt_next"] = _joined(following)
        return parts


def _history(joined: list[RowControls]) -> dict[str, IntArray]:
    penalised = [controls for controls in joined if controls.penalised]
    return {
        "joined": np.array([controls.slot for controls in penalised], np.int32),
        "prompt_slots": _joined(np.full(len(controls.prompt), controls.slot) for controls in penalised),
        "prompt_tokens": _joined(controls.prompt for controls in penalised),
        "output_slots": _joined(np.full(len(controls.output), controls.slot) for controls in penalised),
        "output_tokens": _joined(controls.output for controls in penalised),
    }


def _changes(
    sampled: list[tuple[int, RowControls]], positions: IntArray, filtered: set[int], arrays: dict[str, IntArray]
) -> int:
    """Fill in what changes the logits of the rows; how many of these rows have no filter."""
    changed = []
    for row, controls in sampled:
        masks = int(positions[row]) - controls.prompt_length < controls.min_tokens and len(controls.masked_ids) > 0
        if masks or controls.penalised or len(controls.bias_ids):
            changed.append((row in filtered, row, controls, masks))
    changed.sort(key=lambda entry: entry[:2])
    rows = [controls for _, _, controls, _ in changed]
    penalised = [(index, controls) for index, controls in enumerate(rows) if controls.penalised]
    masking = [(index, entry[2]) for index, entry in enumerate(changed) if entry[3]]
    arrays["changed"] = np.array([row for _, row, _, _ in changed], np.int32)
    arrays["bias_rows"] = np.repeat(np.arange(len(rows)), [len(controls.bias_ids) for controls in rows])
    arrays["bias_ids"] = _joined(controls.bias_ids for controls in rows)
    arrays["bias_values"] = _joined(controls.bias_values.view(np.int32) for controls in rows)
    arrays["penalised_rows"] = np.array([index for index, _ in penalised], np.int32)
    arrays["penalised_slots"] = np.array([controls.slot for _, controls in penalised], np.int32)
    for name in ("repetition", "frequency", "presence"):
        values = np.array([getattr(controls, name) for _, controls in penalised], np.float32)
        arrays[name] = values.view(np.int32)
    arrays["masked_rows"] = _joined(np.full(len(controls.masked_ids), index) for index, controls in masking)
    arrays["masked_ids"] = _joined(controls.masked_ids for _, controls in masking)
    return sum(not entry[0] for entry in changed)


def _sampled_positions(plan: StepPlan) -> IntArray:
    """[S] number of tokens before the sampled one."""
    ends = plan.prefill_starts + plan.prefill_lengths
    return np.concatenate((plan.decode_positions + np.int32(1), ends[plan.prefill_sample == 1]))


def _joined(arrays: Iterable[np.ndarray[tuple[int, ...], np.dtype[np.signedinteger]]]) -> IntArray:
    return np.concatenate((_NONE, *arrays), dtype=np.int32, casting="same_kind")
