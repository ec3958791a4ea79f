"""Selection of tiles for products of a decode batch, and compilation for Hopper. tests/gpu tests the results."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")


from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.config import EngineConfig
from minisgl.engine.start.rehearsal import rehearse
from minisgl.hopper import SHARED_MEMORY
from minisgl.kernels.build.triton import Architecture, Launches
from minisgl.kernels.linear.dense_split_k_gluon import MAX_ROWS, MIN_ROWS, Tile, _batch_linear, _choose
from minisgl.models.config import ModelConfig
from support.kernels.compiled_kernel import compiled, map_type

SMALL = {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)}
ODD = {"qkv": (1152, 896), "o": (896, 896), "gate_up": (9728, 896), "down": (896, 4864)}
"""Products of Qwen2.5-0.5B."""


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [*SMALL.values(), *ODD.values(), (2048, 2048), (7168, 5120), (1000, 1024), (1280, 640)]
)
def test_a_tile_covers_the_product_and_fits_into_shared_memory(outputs: int, inputs: int, in_parts: bool) -> None:
    for rows in range(MIN_ROWS, MAX_ROWS + 1):
        tile = _choose(rows, outputs, inputs, in_parts=in_parts)
        if tile is None:
            continue
        assert outputs % tile.outputs == 0 and inputs % tile.inputs == 0
        assert tile.splits == 1 or (in_parts and tile.splits <= inputs // tile.inputs)
        assert 0 < tile.early <= tile.stages
        assert tile.stages * (tile.rows + tile.outputs) * tile.inputs * 2 + 1024 <= SHARED_MEMORY


@pytest.mark.parametrize("rows", [2, 9, 16, 64])
@pytest.mark.parametrize("name", SMALL)
def test_small_products_of_few_rows_use_the_kernel(name: str, rows: int) -> None:
    for sizes in (SMALL, ODD):
        assert _choose(rows, *sizes[name], in_parts=name in ("o", "down"))


def test_other_products_use_cublas() -> None:
    assert _choose(64, 34816, 5120, in_parts=False) is None
    assert _choose(64, 1024, 1000, in_parts=True) is None
    assert _choose(MAX_ROWS + 1, 4096, 1024, in_parts=False) is None


def test_steps_of_all_sizes_work_with_partial_sums() -> None:
    launches = Launches()
    with launches.recorded(Architecture.parse("9.0a")):
        config = ModelConfig.parse({**BUILTIN_CONFIGS["qwen3-0.6b"], "num_hidden_layers": 2})
        rehearse(config, EngineConfig(model="", device="cuda", max_running=256))
    assert "_batch_linear" in {name.rpartition(".")[2] for name, _ in launches.keys}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "name"), [(16, "qkv"), (100, "gate_up"), (128, "down"), (256, "qkv")])
def test_the_kernel_compiles_for_hopper(rows: int, name: str, bias: bool) -> None:
    tile = _choose(rows, *SMALL[name], in_parts=name == "down")
    assert tile is not None
    constants = _constants(tile) | {"BIAS": bias}
    types = {
        "x": map_type("bf16", tile.rows, tile.inputs),
        "w": map_type("bf16", tile.outputs, tile.inputs),
        "weight": "*bf16",
        "bias": "*bf16",
        "out": "*bf16" if tile.splits == 1 else "*fp32",
    }
    kernel = compiled(_batch_linear, types, constants, default="i32", options={"num_warps": tile.warps})
    assert kernel.asm["cubin"]
    assert kernel.metadata.shared <= SHARED_MEMORY


def _constants(tile: Tile) -> dict[str, object]:
    return {
        "ROWS": tile.rows,
        "OUTPUTS": tile.outputs,
        "INPUTS": tile.inputs,
        "STAGES": tile.stages,
        "EARLY": tile.early,
        "LINES": 16,
        "SWAP": tile.rows < 64,
        "PDL": True,
    }
