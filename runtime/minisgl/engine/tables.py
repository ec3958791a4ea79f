"""State of the engine by slot: one row per running request, and a last row that only pads batches."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from minisgl.engine.logits_processors import LogitsProcessorTable
from minisgl.engine.process_logits import TokenCounts
from minisgl.kernels.sampling_rows import SamplingRows
from minisgl.kernels.step_inputs import store_last_tokens
from minisgl.wire.plan import SAMPLING_COLUMNS, IntArray


class Tables:
    """Device tables. Only steps change them, in the order of the plans, so no change overtakes a step that still reads
    a row."""

    def __init__(self, max_running: int, pages_per_row: int, dummy_page: int, vocab_size: int, device: torch.device):
        rows = max_running + 1
        self.dummy_slot = max_running
        self.page_table = torch.full((rows, pages_per_row), dummy_page, dtype=torch.int32, device=device)
        """[rows, pages_per_row] int32"""
        self.last_token = torch.zeros(rows, dtype=torch.int32, device=device)
        """[rows] int32: input of each row's next decode step"""
        self._sampling = torch.zeros((SAMPLING_COLUMNS - 1, rows), dtype=torch.int32, device=device)
        self.processors = LogitsProcessorTable()
        self.counts = TokenCounts(max_running, vocab_size, device)
        self._vocab_size = vocab_size
        self._filters: NDArray[np.bool_] = np.zeros(rows, np.bool_)

    def record_filters(self, new_rows: IntArray) -> None:
        """Record on the host which of the rows [SAMPLING_COLUMNS, N] have top-k, top-p or min-p, so that `filtered`
        does not wait for the device. Call it once per plan, before `filtered`."""
        slots, temperature, top_k, top_p, min_p = new_rows[:5]
        filters = (top_k > 0) & (top_k < self._vocab_size)
        filters |= (top_p.view(np.float32) < 1) | (min_p.view(np.float32) > 0)
        self._filters[slots] = filters & (temperature.view(np.float32) > 0)

    def filtered(self, slots: IntArray) -> IntArray:
        """Indices into `slots` of the rows with top-k, top-p or min-p; all others skip these filters."""
        return np.flatnonzero(self._filters[slots]).astype(np.int32)

    def set_rows(self, new_rows: torch.Tensor) -> None:
        """Store sampling parameters: `new_rows` [SAMPLING_COLUMNS, N] int32, on the device."""
        self._sampling.index_copy_(1, new_rows[0].long(), new_rows[1:])

    def set_pages(self, updates: torch.Tensor) -> None:
        """Update page tables: `updates` [3, U] int32 on the device are slot, index and page."""
        self.page_table.index_put_((updates[0].long(), updates[1].long()), updates[2])

    def sampling_rows(self, slots: torch.Tensor, positions: torch.Tensor) -> SamplingRows:
        """Sampling parameters of `slots` [S]; `positions` [S] counts the tokens before the sampled one."""
        return SamplingRows(self._sampling, slots, positions)

    def set_last_tokens(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Make `tokens` [S] the inputs of the next decode step. A row without a valid token (−1) continues with token
        0: its request has ended, but with overlap one more step of it may be in flight."""
        store_last_tokens(self.last_token, slots, tokens)
