"""The kernel of blocks of a draft head, interpreted on a CPU and compiled for Hopper."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from minisgl.kernels.attention import block_attention_triton
from support.kernels.compiled_kernel import compiled
from support.kernels.interpreted_block import CASES
from support.kernels.interpreter import interpreted


def test_blocks_attend_as_in_torch() -> None:
    differences = interpreted("support.kernels.interpreted_block")
    assert differences.keys() == CASES.keys()
    assert all(value < 1e-5 for value in differences.values()), differences


@pytest.mark.parametrize(("kv_heads", "group", "tokens"), [(8, 5, 16), (8, 4, 16), (2, 1, 10)])
def test_compiles_for_hopper(kv_heads: int, group: int, tokens: int) -> None:
    numbers = {"v_stride": "i32", "pages_per_row": "i32", "scale": "fp32"}
    halves = dict.fromkeys(("q", "k", "v", "keys", "values", "out"), "*bf16")
    constants = {
        "TOKENS": tokens, "KV_HEADS": kv_heads, "GROUP": group, "HEAD_DIM": 128, "COLUMNS": 128, "PAGE": 64, "KEYS": 64,
        "OWN": 16, "QUERIES": block_attention_triton._QUERIES,
    }  # fmt: skip
    made = compiled(block_attention_triton._block_attention, numbers | halves, constants)
    assert made.asm["cubin"]
