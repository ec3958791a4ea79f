"""Selection of tiles for products with weights of 4 bits, and compilation for Hopper. tests/gpu tests the results."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from triton.experimental.gluon import language as gl

from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.config import EngineConfig
from minisgl.engine.rehearsal import rehearse
from minisgl.kernels.build.triton import Architecture, Launches
from minisgl.kernels.int4_linear_gluon import STEP, _int4_linear, int4_tile
from minisgl.models.config import ModelConfig
from support.kernels.compiled_kernel import compiled
from support.kernels.interpreter import interpreted

QWEN3_14B = {"qkv": (7168, 5120), "o": (5120, 5120), "gate_up": (34816, 5120), "down": (5120, 17408)}
SHARED_MEMORY = 227 << 10


def shared_memory(rows: int, outputs: int, stages: int, groups: int) -> int:
    return stages * (rows * STEP * 2 + outputs * STEP // 2 + outputs * groups * 4)


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [*QWEN3_14B.values(), (1152, 896), (128, 128)])
def test_a_tile_covers_the_product_and_fits(outputs: int, inputs: int, in_parts: bool) -> None:
    for rows in range(1, 1025):
        tile = int4_tile(rows, outputs, inputs, in_parts=in_parts)
        if tile is None:
            assert rows > 128
            continue
        assert outputs % tile.outputs == 0 and tile.stages > 0
        assert tile.splits == 1 or (in_parts and tile.splits <= inputs // STEP)
        assert shared_memory(tile.rows, tile.outputs, tile.stages, 2) + 1024 <= SHARED_MEMORY // 2


def test_a_model_with_weights_of_4_bits_launches_their_kernels() -> None:
    config = ModelConfig.parse({**BUILTIN_CONFIGS["qwen3-14b"], "num_hidden_layers": 2}, quantization="int4")
    launches = Launches()
    with launches.recorded(Architecture.parse("9.0a")):
        rehearse(config, EngineConfig(model="", device="cuda", max_running=64))
    kernels = {name.rpartition(".")[2] for name, _ in launches.keys}
    assert {"_int4_linear", "_dequantize"} <= kernels


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("rows", "name"), [(1, "gate_up"), (64, "qkv"), (128, "down")])
def test_the_kernel_compiles_for_hopper_and_moves_no_weights_between_threads(rows: int, name: str, groups: int) -> None:
    tile = int4_tile(rows, *QWEN3_14B[name], in_parts=name == "down")
    assert tile is not None
    swizzled = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    types = {
        "x": f"tensordesc<bf16[{tile.rows}, {STEP}],{swizzled!r}>",
        "w": f"tensordesc<i32[{tile.outputs // 8}, 128],{plain!r}>",
        "scale": f"tensordesc<i32[{groups}, {tile.outputs}],{plain!r}>",
        "bias": "*bf16",
        "out": "*bf16" if tile.splits == 1 else "*fp32",
    }
    constants = {"ROWS": tile.rows, "OUTPUTS": tile.outputs, "STAGES": tile.stages, "GROUPS": groups}
    constants |= {"BIAS": tile.splits == 1, "STEP": STEP, "PDL": True}
    kernel = compiled(_int4_linear, types, constants, default="i32", options={"num_warps": 4})
    assert kernel.metadata.shared <= SHARED_MEMORY // 2


def test_dequantized_weights_are_bitwise_those_of_torch() -> None:
    cases = interpreted("support.kernels.interpreted_int4")
    assert cases and all(cases.values())
