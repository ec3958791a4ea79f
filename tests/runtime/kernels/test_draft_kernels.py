"""The kernels of speculation, interpreted on a CPU and compiled for Hopper; tests/gpu runs them on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from minisgl.kernels.build.triton import Architecture, Launches
from minisgl.kernels.speculation import place_drafts_triton, verify_drafts_triton
from minisgl.kernels.speculation.place_drafts import place_drafts
from minisgl.kernels.speculation.row_text_tables import RowTextTables
from minisgl.kernels.speculation.step_rows import DecodeRows, SampledRows
from minisgl.kernels.speculation.verify_drafts import verify_drafts
from support.kernels.compiled_kernel import compiled
from support.kernels.drafts import CASES
from support.kernels.interpreter import interpreted


def test_drafts_are_verified_found_and_placed_as_by_torch() -> None:
    assert interpreted("support.kernels.interpreted_drafts") == dict.fromkeys(CASES, True)


@pytest.mark.parametrize(
    ("kernel", "numbers", "constants", "warps"),
    [
        (place_drafts_triton._place_drafts, ("capacity", "decode", "sampled", "dummy_slot"), {"BLOCK": 512}, 8),
        (
            verify_drafts_triton._verify_drafts,
            ("capacity", "rows"),
            {"BLOCK": verify_drafts_triton._BLOCK, "LANES": 512, "PDL": True},
            16,
        ),
    ],
)
def test_compiles_for_hopper(kernel: Any, numbers: tuple[str, ...], constants: dict[str, Any], warps: int) -> None:
    made = compiled(kernel, dict.fromkeys(numbers, "i32"), constants, options={"num_warps": warps})
    assert made.asm["cubin"]


def test_all_sizes_and_addresses_have_one_kernel() -> None:
    launches = Launches()
    with launches.recorded(Architecture.parse("9.0a")):
        for rows, capacity, at in ((1, 16, 0), (16, 4096, 16), (17, 4097, 3), (512, 262_144, 64)):
            device = torch.device("cuda")
            tables = RowTextTables.empty(rows + 1, capacity, device)
            part = torch.empty(at + rows, dtype=torch.int32, device=device)[at:]
            place_drafts(tables, DecodeRows(part, part, part, part, part), rows)
            verify_drafts(tables, SampledRows(part, part, part), part, part)
    assert sorted(name.rpartition(".")[2] for name, _ in launches.keys) == ["_place_drafts", "_verify_drafts"]
