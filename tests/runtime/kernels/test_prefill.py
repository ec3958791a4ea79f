"""Attention of prompts by our own kernel. Without a GPU it is interpreted; tests/gpu has the same on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from minisgl.hopper import SHARED_MEMORY
from minisgl.kernels.attention import prefill_triton
from support.kernels.compiled_kernel import compiled
from support.kernels.interpreted_prefill import CASES
from support.kernels.interpreter import interpreted


@pytest.fixture(scope="module")
def errors() -> Any:
    return interpreted("support.kernels.interpreted_prefill")


@pytest.mark.parametrize("name", [*CASES, "empty segments"])
def test_attention_matches_float64(errors: dict[str, float], name: str) -> None:
    assert 0 <= errors[name] < 1e-5


@pytest.mark.parametrize("stored", ["*bf16", "*fp8e4nv"])
@pytest.mark.parametrize(
    ("head_dim", "group", "window", "softcap"),
    [(512, 8, 0, 0.0), (64, 8, 128, 0.0), (256, 2, 1024, 0.0), (256, 2, 0, 50.0)],
)
def test_a_program_fits_on_a_hopper_multiprocessor(
    head_dim: int, group: int, window: int, softcap: float, stored: str
) -> None:
    tiles = prefill_triton.choose_tiles(head_dim, 64)
    types = dict.fromkeys(("q", "sinks", "out"), "*bf16") | dict.fromkeys(("keys", "values"), stored)
    aligned = [*types, "q_stride"]
    types |= dict.fromkeys(("segments", "pages_per_row", "q_stride"), "i32")
    types |= dict.fromkeys(("scale", "value_scale"), "fp32")
    constants = {
        "KV_HEADS": 4,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PAGE": 64,
        "VECTORS": tiles.vectors,
        "KEYS": tiles.keys,
        "WINDOW": window,
        "SOFTCAP": softcap,
        "SINKS": window > 0,
    }
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    kernel = compiled(prefill_triton._attend_tile, types, constants, aligned=aligned, options=options)
    assert kernel.metadata.shared <= SHARED_MEMORY
    assert "wgmma" in kernel.asm["ptx"] and "cp.async" in kernel.asm["ptx"]
