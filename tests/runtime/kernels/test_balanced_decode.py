"""Decode attention in spans of equal size against float64, without a GPU; tests/gpu has the same on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")


from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.config import EngineConfig
from minisgl.engine.start.rehearsal import rehearse
from minisgl.hopper import SHARED_MEMORY
from minisgl.kernels.attention.stream_k_decode_gluon import _attend
from minisgl.kernels.build.triton import Architecture, Launches
from minisgl.models.config import ModelConfig
from support.kernels.compiled_kernel import compiled, map_type
from support.kernels.interpreted_balanced import CASES
from support.kernels.interpreter import interpreted

RESERVED = 1 << 10
"""Bytes of shared memory per program."""


@pytest.fixture(scope="module")
def errors() -> Any:
    return interpreted("support.kernels.interpreted_balanced")


@pytest.mark.parametrize("name", CASES)
def test_attention_matches_float64(errors: dict[str, float], name: str) -> None:
    assert 0 <= errors[name] < 2e-3


def test_blocks_with_drafts_are_read_when_they_are_stored(errors: dict[str, float]) -> None:
    assert errors["blocks of drafts"] == 0


@pytest.mark.parametrize("window", [0, 4096])
@pytest.mark.parametrize(
    ("group", "columns", "block", "stages", "kind"),
    [
        (5, 128, 32, 3, "bf16"),
        (8, 64, 32, 6, "bf16"),
        (7, 64, 32, 6, "bf16"),
        (4, 256, 16, 3, "bf16"),
        (16, 128, 32, 3, "bf16"),
        # Pairs of FP8 numbers, heads of 128, 64 and 256.
        (5, 64, 32, 6, "i16"),
        (7, 32, 32, 12, "i16"),
        (4, 128, 16, 6, "i16"),
    ],
)
def test_four_programs_fit_on_a_hopper_multiprocessor(
    group: int, columns: int, block: int, stages: int, kind: str, window: int
) -> None:
    tiles = map_type(kind, block, columns, swizzle=min(128, 2 * columns))
    constants = {"KV_HEADS": 8, "GROUP": group, "STAGES": stages, "WINDOW": window, "SINKS": True, "PDL": True}
    types = {"keys": tiles, "values": tiles, "rows": "i32", "q": "*bf16", "sinks": "*bf16", "result": "*bf16"}
    types |= dict.fromkeys(("scale", "value_scale"), "fp32") | dict.fromkeys(("parts", "sums"), "*fp32")
    shared = compiled(_attend, types, constants, options={"num_warps": 1}).metadata.shared
    assert 4 * (shared + RESERVED) <= SHARED_MEMORY


def test_rehearsal_covers_steps_of_many_rows() -> None:
    launches = Launches()
    with launches.recorded(Architecture.parse("9.0a")):
        config = ModelConfig.parse({**BUILTIN_CONFIGS["qwen3-0.6b"], "num_hidden_layers": 2})
        rehearse(config, EngineConfig(model="", device="cuda", max_running=16))
    assert {"_cut", "_attend"} <= {name.rpartition(".")[2] for name, _ in launches.keys}
