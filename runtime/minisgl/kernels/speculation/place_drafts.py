"""Positions and input tokens of decode rows whose sequences have lengths that only the device knows."""

from __future__ import annotations

import torch

from minisgl.kernels.speculation.row_text_tables import RowTextTables
from minisgl.kernels.speculation.step_rows import DecodeRows


def place_drafts(tables: RowTextTables, rows: DecodeRows, dummy_slot: int) -> torch.Tensor:
    """Complete `rows` in place. Rows that have the last token of their sequence, or are behind it, get the dummy slot:
    there is no page for them. Returns the input tokens [D] int32; 0 where there is no draft."""
    if rows.slots.is_cuda:
        from minisgl.kernels.speculation.place_drafts_triton import place_drafts_cuda

        return place_drafts_cuda(tables, rows, dummy_slot)
    slots = rows.slots.long()
    positions = tables.next_position[slots] + rows.positions
    beyond = positions >= tables.limit[slots] - 1
    tokens = tables.texts[slots, tables.origin[slots] + positions.where(~beyond, 0)].clamp(min=0)
    rows.slots[beyond] = dummy_slot
    rows.positions.copy_(positions.where(~beyond, 0))
    torch.add(rows.positions, 1, out=rows.lengths)
    decode = rows.sample_rows < len(slots)
    rows.sample_positions[decode] = rows.lengths[rows.sample_rows[decode].long()]
    return tokens.where(~beyond, 0)
