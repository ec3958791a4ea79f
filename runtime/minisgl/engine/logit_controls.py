"""Penalties, biases and masks on the logits of the rows that ask for them."""

from __future__ import annotations

from typing import Final

import torch

from minisgl.engine.step_controls import DeviceControls

MASKED: Final = -1e30
"""The logit of a token that must not be chosen. Finite, since a row with an infinite logit counts as damaged, and
far from float32's end, since temperatures down to 1e-5 divide it."""

_IN_PROMPT: Final = 1
_ONCE: Final = 2


class TokenCounts:
    """[rows, vocab] int32: twice how often a row has generated a token, plus one if its prompt holds the token.

    Allocated when the first row asks: most servers never see one.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (rows, vocab_size)
        self._device = device
        self._table: torch.Tensor | None = None

    @property
    def table(self) -> torch.Tensor:
        if self._table is None:
            self._table = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        return self._table

    def join(self, controls: DeviceControls) -> None:
        """Rows join with their history."""
        if not len(controls.joined):
            return
        self.table.index_fill_(0, controls.joined.long(), 0)
        in_prompt = self.table.new_full((), _IN_PROMPT)
        self.table.index_put_((controls.prompt_slots.long(), controls.prompt_tokens.long()), in_prompt)
        self._add(controls.output_slots, controls.output_tokens)

    def sampled(self, controls: DeviceControls, tokens: torch.Tensor) -> None:
        """Count the step's `tokens` [S]. A row without a valid token (−1) has ended."""
        if len(controls.penalised_rows):
            rows = controls.changed.long()[controls.penalised_rows.long()]
            self._add(controls.penalised_slots, tokens[rows].clamp(min=0))

    def _add(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        once = self.table.new_full((), _ONCE).expand(len(slots))
        self.table.index_put_((slots.long(), tokens.long()), once, accumulate=True)


def change_logits(logits: torch.Tensor, controls: DeviceControls, counts: TokenCounts) -> None:
    """Change `logits` [C, vocab] float32 of the rows `controls.changed` in place, in vLLM's order: bias, then the
    penalties for repetition, frequency and presence. The mask comes last, where no penalty can lift it."""
    if len(controls.bias_rows):
        place = (controls.bias_rows.long(), controls.bias_ids.long())
        logits.index_put_(place, logits[place] + controls.bias_values.view(torch.float32))
    if len(controls.penalised_rows):
        _penalise(logits, controls, counts.table)
    if len(controls.masked_rows):
        masked = logits.new_full((), MASKED)
        logits.index_put_((controls.masked_rows.long(), controls.masked_ids.long()), masked)


def _penalise(logits: torch.Tensor, controls: DeviceControls, table: torch.Tensor) -> None:
    def column(bits: torch.Tensor) -> torch.Tensor:
        return bits.view(torch.float32)[:, None]

    rows = controls.penalised_rows.long()
    counts = table[controls.penalised_slots.long()]
    before, repetition = logits[rows], column(controls.repetition)
    repeated = torch.where(before > 0, before / repetition, before * repetition)
    after = torch.where(counts > 0, repeated, before)
    # An arithmetic shift drops the prompt's bit.
    generated = counts >> 1
    after -= column(controls.frequency) * generated
    after -= column(controls.presence) * (generated > 0)
    logits.index_copy_(0, rows, after)
