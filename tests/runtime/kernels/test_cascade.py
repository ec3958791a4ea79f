"""The cascade kernels against float64. Without a GPU they are interpreted; tests/gpu has the same on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from minisgl.hopper import SHARED_MEMORY
from minisgl.kernels.attention import cascade_decode_triton
from support.kernels.compiled_kernel import compiled
from support.kernels.interpreted_cascade import CASES
from support.kernels.interpreter import interpreted

"""Bytes of shared memory of a multiprocessor of a Hopper GPU."""


@pytest.fixture(scope="module")
def errors() -> Any:
    return interpreted("support.kernels.interpreted_cascade")


@pytest.mark.parametrize("name", CASES)
def test_attention_matches_float64(errors: dict[str, float], name: str) -> None:
    assert 0 <= errors[name] < 2e-3


@pytest.mark.parametrize("group", [2, 5, 8])
@pytest.mark.parametrize(
    ("kernel", "constants", "launch", "programs"),
    [
        (cascade_decode_triton._shared, {"TILE": 128}, cascade_decode_triton._SHARED_LAUNCH, 2),
        (cascade_decode_triton._own, {"VECTORS": 16, "SPLITS": 8}, cascade_decode_triton._OWN_LAUNCH, 8),
    ],
    ids=["shared", "own"],
)
def test_two_programs_fit_on_a_hopper_multiprocessor(
    kernel: Any, constants: dict[str, int], launch: dict[str, int], programs: int, group: int
) -> None:
    constants = constants | {
        "KV_HEADS": 8,
        "GROUP": group,
        "HEAD_DIM": 128,
        "PAGE": 64,
        "BLOCK": cascade_decode_triton._BLOCK,
        "PDL": True,
    }
    if "TILE_ROWS" in kernel.arg_names:
        constants["TILE_ROWS"] = 128 // group
    types = dict.fromkeys(("q", "keys", "values", "parts", "result"), "*bf16")
    types |= {"sums": "*fp32", "rows": "i32", "pages_per_row": "i32", "scale": "fp32", "value_scale": "fp32"}
    aligned = [name for name, type in types.items() if name in kernel.arg_names and type[0] == "*"]
    shared = compiled(kernel, types, constants, aligned=aligned, options=launch).metadata.shared
    assert programs * shared <= SHARED_MEMORY
