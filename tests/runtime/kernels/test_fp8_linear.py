"""Selection of tiles for products with FP8 weights, and compilation for Hopper. tests/gpu tests the results."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

pytest.importorskip("triton")

from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.config import EngineConfig
from minisgl.engine.start.rehearsal import rehearse
from minisgl.engine.start.warm_up import _TOKENS
from minisgl.hopper import MULTIPROCESSORS, SHARED_MEMORY
from minisgl.kernels.build.triton import Architecture, Launches
from minisgl.kernels.linear.fp8_skinny_gluon import Tile, _fp8_linear, fp8_tile
from minisgl.models.config import ModelConfig
from support.kernels.compiled_kernel import compiled, map_type
from support.kernels.experts import weights_of_experts
from support.kernels.interpreted_fp8_rows import CASES
from support.kernels.interpreter import interpreted

QWEN3_14B = {"qkv": (7168, 5120), "o": (5120, 5120), "gate_up": (34816, 5120), "down": (5120, 17408)}
ODD = {"qkv": (1152, 896), "gate_up": (9728, 896), "one block": (128, 128)}


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [*QWEN3_14B.values(), *ODD.values()])
def test_a_tile_covers_the_product_and_all_programs_of_few_rows_run_at_once(
    outputs: int, inputs: int, in_parts: bool
) -> None:
    for rows in range(1, 257):
        tile = fp8_tile(rows, outputs, inputs, in_parts=in_parts)
        if tile is None:
            assert rows > 64
            continue
        assert outputs % tile.outputs == 0
        assert tile.splits == 1 or (in_parts and tile.splits <= inputs // 128)
        blocks = tile.stages * tile.together
        assert 0 < blocks < -(-inputs // 128 // tile.splits) + tile.together
        shared = blocks * ((tile.rows + tile.outputs) * 128 + 4 * max(tile.rows, 32)) + 1024
        programs = -(-rows // tile.rows) * (outputs // tile.outputs) * tile.splits
        assert rows > 64 or programs <= MULTIPROCESSORS * (SHARED_MEMORY // shared)


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [*QWEN3_14B.values(), *ODD.values()])
def test_the_warm_up_launches_all_tiles(outputs: int, inputs: int, in_parts: bool) -> None:
    """Else a kernel would be compiled while requests wait."""

    def tiles(sizes: Iterable[int]) -> set[Tile | None]:
        return {fp8_tile(rows, outputs, inputs, in_parts=in_parts) for rows in sizes}

    assert tiles(_TOKENS) == tiles(range(1, 2050))


def test_cublas_computes_products_of_many_rows() -> None:
    assert fp8_tile(65, 34816, 5120, in_parts=False) is None
    assert fp8_tile(129, 5120, 17408, in_parts=True) is None


@pytest.mark.parametrize(("quantization", "ranks"), [("fp8", 1), ("fp8-block", 8)])
def test_a_model_with_fp8_weights_launches_their_kernels(quantization: str, ranks: int) -> None:
    config = ModelConfig.parse(BUILTIN_CONFIGS["qwen3-14b"], quantization=quantization)
    launches = Launches()
    with launches.recorded(Architecture.parse("9.0a")):
        rehearse(config, EngineConfig(model="", device="cuda", max_running=256, tensor_parallel=ranks))
    kernels = {name.rpartition(".")[2] for name, _ in launches.keys}
    assert {"_fp8_linear", "_add_rms_norm_fp8", "_quantize_rows", "_fp8_row"} <= kernels


def test_a_model_with_experts_in_fp8_launches_their_kernels() -> None:
    config = ModelConfig.parse({**BUILTIN_CONFIGS["qwen3-30b-a3b"], "num_hidden_layers": 2}, quantization="fp8-block")
    for ranks, kept in ((2, True), (4, False)):
        launches = Launches()
        with launches.recorded(Architecture.parse("9.0a")):
            rehearse(config, EngineConfig(model="", device="cuda", max_running=256, tensor_parallel=ranks))
        files = {name.split(".")[-2] for name, _ in launches.keys}
        assert any(name.endswith("._dequantize_blocks") for name, _ in launches.keys) is kept
        assert weights_of_experts(launches) == {"*fp8e4nv" if kept else "*bf16"}
        assert "grouped_gemm_triton" in files


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "name"), [(1, "qkv"), (64, "gate_up"), (128, "down")])
def test_the_kernel_compiles_for_hopper(rows: int, name: str, bias: bool, channels: bool) -> None:
    tile = fp8_tile(rows, *QWEN3_14B[name], in_parts=name == "down")
    assert tile is not None
    types = {
        "x": map_type("fp8e4nv", tile.rows, 128),
        "w": map_type("fp8e4nv", tile.outputs, 128),
        "x_scales": map_type("fp32", 1, max(tile.rows, 32), swizzle=0),
        "x_scale": "*fp32",
        "w_scale": "*fp32",
        "bias": "*bf16" if bias else "*fp32",
        "out": "*bf16" if tile.splits == 1 else "*fp32",
    }
    constants = {"ROWS": tile.rows, "OUTPUTS": tile.outputs, "STAGES": tile.stages, "TOGETHER": tile.together}
    constants |= {"CHANNELS": channels, "BIAS": bias, "PDL": True}
    kernel = compiled(_fp8_linear, types, constants, default="i32", options={"num_warps": 4})
    assert kernel.asm["cubin"]
    assert kernel.metadata.shared <= SHARED_MEMORY


def test_activations_are_quantized_as_torch_does() -> None:
    assert interpreted("support.kernels.interpreted_fp8_rows") == dict.fromkeys(CASES, True)
