"""State of the engine by slot: one row per running request, and a last row that only pads batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minisgl.engine.logits_processors import DeviceChanges, LogitsProcessorTable
from minisgl.kernels.pointwise.step_inputs import store_last_tokens
from minisgl.kernels.sampling.processor_tables import ProcessorTables
from minisgl.kernels.sampling.sampling_rows import COLUMNS, SamplingRows
from minisgl.kernels.speculation.row_text_tables import RowTextTables
from minisgl.wire.plan import IntArray
from minisgl.wire.row_texts import decode_texts, text_capacity

if TYPE_CHECKING:
    from minisgl.kernels.sampling.resample_triton import Workspace


class Tables:
    """Device tables. Only steps change them, in the order of the plans, so no change overtakes a step that still reads
    a row."""

    def __init__(
        self,
        max_running: int,
        pages_per_row: int,
        dummy_page: int,
        vocab_size: int,
        device: torch.device,
        dummy_window_page: int | None = None,
        *,
        has_chunks: bool = False,
        decode_rows: int = 0,
        text_length: int = 0,
    ) -> None:
        """`dummy_window_page`: that of layers with a window; None: there are none. `has_chunks`: steps have a
        table of the chunks of their prompts, for kernels of recurrent states. `decode_rows`: most rows that a step
        samples, if more than `max_running`. `text_length`: longest sequence, for texts in which drafts are found; 0:
        none are."""
        rows = max_running + 1
        self.has_chunks = has_chunks
        self.dummy_slot = max_running
        table_rows = max(rows, decode_rows)
        self.page_table = torch.full((table_rows, pages_per_row), dummy_page, dtype=torch.int32, device=device)
        """[≥ rows, pages_per_row] int32; as many rows as a step may decode, since backends take its size for that."""
        self.window_table = None if dummy_window_page is None else torch.full_like(self.page_table, dummy_window_page)
        """The same for layers with a window."""
        self.last_token = torch.zeros(rows, dtype=torch.int32, device=device)
        """[rows] int32: input of each row's next decode step"""
        self._sampling = torch.zeros((COLUMNS, rows), dtype=torch.int32, device=device)
        self.processors = LogitsProcessorTable(rows, vocab_size)
        self._vocab_size = vocab_size
        self.sampled_rows = max(decode_rows, max_running)
        """Most rows that a step samples."""
        self.texts = None
        if text_length:
            self.texts = RowTextTables.empty(rows, text_capacity(text_length), device, text_length)
        """Texts in which drafts are found; None: the engine does not speculate."""
        self.device_processors = ProcessorTables(rows, vocab_size, device)

    def set_rows(self, new_rows: torch.Tensor) -> None:
        """Store parameters of joining rows: `new_rows` [NEW_ROW_COLUMNS, N] int32, on the device."""
        self._sampling.index_copy_(1, new_rows[0].long(), new_rows[1:])

    def apply(self, changes: DeviceChanges) -> None:
        """Store lists and token counts of joining rows."""
        if len(changes.list_slots):
            self.device_processors.set_lists(*changes[:4], changes.longest_list)
        if len(changes.counted):
            self.device_processors.set_counts(*changes[4:8])

    def set_texts(self, texts: IntArray, on_device: torch.Tensor) -> None:
        """Store the texts of joining rows: `StepPlan.texts`, and the same on the device."""
        assert self.texts is not None
        for first, text in decode_texts(texts):
            header, tokens = on_device[first + 1 : first + 3], on_device[first + 4 : first + 4 + len(text.tokens)]
            self.texts.set_text(text.slot, header, tokens)

    def set_pages(self, updates: torch.Tensor) -> None:
        """Update page tables: `updates` [3, U] int32 on the device are slot, index and page."""
        self.page_table.index_put_((updates[0].long(), updates[1].long()), updates[2])

    def set_window_pages(self, updates: torch.Tensor) -> None:
        """The same for layers with a window."""
        assert self.window_table is not None
        self.window_table.index_put_((updates[0].long(), updates[1].long()), updates[2])

    def sampling_rows(self, slots: torch.Tensor, positions: torch.Tensor) -> SamplingRows:
        """Sampling parameters of `slots` [S]; `positions` [S] counts the tokens before the sampled one."""
        return SamplingRows(self._sampling, slots, positions)

    def workspace(self) -> Workspace | None:
        """Memory that sampling needs on CUDA for all rows."""
        if self.page_table.device.type != "cuda":
            return None
        from minisgl.kernels.sampling.resample_triton import Workspace

        return Workspace(self.sampled_rows, self._vocab_size, self.page_table.device)

    def set_last_tokens(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Make `tokens` [S] the inputs of the next decode step. A row without a valid token (−1) continues with token
        0: its request has ended, but with overlap one more step of it may be in flight."""
        store_last_tokens(self.last_token, slots, tokens)
