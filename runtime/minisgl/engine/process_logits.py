"""Logits processors on the device: biases, penalties and masks, and the token counts that penalties need."""

from __future__ import annotations

from typing import Final

import torch

from minisgl.engine.logits_processors import DeviceLogitsProcessors

MASKED: Final = -1e30
"""Logit of a masked token. Finite, since a row with an infinite logit counts as damaged, and far from the limit of
float32, since temperatures down to 1e-5 divide it."""

_IN_PROMPT: Final = 1
_ONCE: Final = 2


class TokenCounts:
    """Tokens of each row's prompt and output, for the penalties; allocated when the first row needs it, since most
    servers never have one."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (rows, vocab_size)
        self._device = device
        self._table: torch.Tensor | None = None

    @property
    def table(self) -> torch.Tensor:
        """[rows, vocab] int32: twice the number of times a row has generated a token, plus one if its prompt contains
        the token."""
        if self._table is None:
            self._table = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        return self._table

    def join(self, processors: DeviceLogitsProcessors) -> None:
        """Count the history of the rows that join."""
        if not len(processors.joined):
            return
        self.table.index_fill_(0, processors.joined.long(), 0)
        in_prompt = self.table.new_full((), _IN_PROMPT)
        self.table.index_put_((processors.prompt_slots.long(), processors.prompt_tokens.long()), in_prompt)
        self._add(processors.output_slots, processors.output_tokens)

    def add_sampled(self, processors: DeviceLogitsProcessors, tokens: torch.Tensor) -> None:
        """Count the step's `tokens` [S]. A row without a valid token (−1) has ended."""
        if len(processors.penalized_rows):
            rows = processors.changed.long()[processors.penalized_rows.long()]
            self._add(processors.penalized_slots, tokens[rows].clamp(min=0))

    def _add(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        once = self.table.new_full((), _ONCE).expand(len(slots))
        self.table.index_put_((slots.long(), tokens.long()), once, accumulate=True)


def process_logits(logits: torch.Tensor, processors: DeviceLogitsProcessors, counts: TokenCounts) -> None:
    """Change `logits` [C, vocab] float32 of the rows `processors.changed` in place, in vLLM's order: bias, then the
    penalties for repetition, frequency and presence. The mask comes last, where no penalty can undo it."""
    if len(processors.bias_rows):
        place = (processors.bias_rows.long(), processors.bias_ids.long())
        logits.index_put_(place, logits[place] + processors.bias_values.view(torch.float32))
    if len(processors.penalized_rows):
        _penalize(logits, processors, counts.table)
    if len(processors.masked_rows):
        masked = logits.new_full((), MASKED)
        logits.index_put_((processors.masked_rows.long(), processors.masked_ids.long()), masked)


def _penalize(logits: torch.Tensor, processors: DeviceLogitsProcessors, table: torch.Tensor) -> None:
    rows = processors.penalized_rows.long()
    repetition, frequency, presence = processors.penalties.view(torch.float32).view(3, -1, 1)
    counts = table[processors.penalized_slots.long()]
    before = logits[rows]
    repeated = torch.where(before > 0, before / repetition, before * repetition)
    after = torch.where(counts > 0, repeated, before)
    # An arithmetic shift drops the prompt's bit.
    generated = counts >> 1
    after -= frequency * generated
    after -= presence * (generated > 0)
    logits.index_copy_(0, rows, after)
