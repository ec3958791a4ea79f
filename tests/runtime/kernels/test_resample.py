"""The kernels that sample rows with filters and logits processors again, interpreted on a CPU; tests/gpu has the same
on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from minisgl.kernels.sampling import filter_triton, logprobs_triton, resample_triton, scan_logits_triton
from minisgl.kernels.sampling.sampling_rows import MOST_TOPS
from support.kernels.compiled_kernel import compiled
from support.kernels.interpreted_resampling import CASES
from support.kernels.interpreter import interpreted

FLOATS = ("changed_logits", "maxima", "sums", "sums_above", "raw_maxima", "raw_sums", "scores", "found")
SIZES = ("row_stride", "columns", "table_stride", "bitmask_words", "groups", "parts")
TYPES = dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(SIZES, "i32") | {"counts": "*i16", "lists": "*i64"}
LISTS = {"CHOSEN": resample_triton._CHOSEN, "FOUND": resample_triton._FOUND, "CHUNK": resample_triton._CHUNK}


@pytest.fixture(scope="module")
def faults() -> Any:
    return interpreted("support.kernels.interpreted_resampling")


@pytest.mark.parametrize("name", CASES)
def test_rows_are_sampled_as_by_torch(faults: dict[str, list[str]], name: str) -> None:
    assert faults[name] == []


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("kernel", "constants", "warps"),
    [
        *(
            (
                scan_logits_triton.scan_logits,
                {"LISTS": lists, "GROUPS": resample_triton._GROUPS, "BLOCKS": resample_triton._BLOCKS},
                8,
            )
            for lists in (False, True)
        ),
        (
            filter_triton.sample_candidates,
            LISTS | {"SHIFT": 16, "BLOCK": 4096, "PARTS": 128, "USUAL": resample_triton._USUAL, "PDL": True},
            8,
        ),
        (filter_triton.sample_whole_rows, {"SHIFT": 16, "GROUPS": 4096, "BLOCK": 4096, "PDL": True}, 16),
        (
            logprobs_triton.report_logprobs,
            LISTS | {"SHIFT": 16, "BLOCK": 4096, "MOST": MOST_TOPS, "PDL": True},
            8,
        ),
    ],
)
def test_compiles_for_hopper(kernel: Any, constants: dict[str, Any], warps: int, dtype: str) -> None:
    made = compiled(kernel, TYPES | {"logits": f"*{dtype}"}, constants, options={"num_warps": warps})
    assert made.asm["cubin"]
