"""Selection of kernels for products with weights of 4 bits, and compilation for Hopper. tests/gpu tests the results."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")


from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.config import EngineConfig
from minisgl.engine.start.rehearsal import rehearse
from minisgl.hopper import REGISTERS, SHARED_MEMORY
from minisgl.kernels.build.triton import Architecture, Launches
from minisgl.kernels.experts import gemv_gluon, int4_pairs_triton
from minisgl.kernels.linear.int4_choose import int4_tile
from minisgl.kernels.linear.int4_gemv_gluon import RowTile, _int4_row
from minisgl.kernels.linear.int4_skinny_triton import SkinnyTile, _int4_skinny
from minisgl.kernels.linear.int4_split_k_gluon import BatchTile, _int4_batch
from minisgl.kernels.linear.int4_stream_k_gluon import SpansTile, _int4_spans
from minisgl.models.config import ModelConfig
from support.kernels.compiled_kernel import compiled, map_type
from support.kernels.experts import weights_of_experts
from support.kernels.interpreter import interpreted

QWEN3_14B = {"qkv": (7168, 5120), "o": (5120, 5120), "gate_up": (34816, 5120), "down": (5120, 17408)}


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [*QWEN3_14B.values(), (8192, 28672), (1152, 896), (64, 128)])
def test_a_tile_covers_the_product_and_fits(outputs: int, inputs: int, in_parts: bool) -> None:
    for rows in range(1, 1025):
        tile = int4_tile(rows, outputs, inputs, in_parts=in_parts, groups=1)
        if tile is None:
            assert rows > 256
        elif isinstance(tile, RowTile):
            assert rows == 1 and 1 <= tile.splits <= inputs // 128
        elif isinstance(tile, BatchTile):
            assert rows > 128 and outputs % tile.outputs == 0 and 1 <= tile.splits <= inputs // 128
            assert tile.slots * (tile.rows * 64 * 2 + 8) + 1024 <= SHARED_MEMORY // 2
        else:
            assert isinstance(tile, SpansTile) and rows <= tile.rows and outputs % (16 * tile.warps) == 0


@pytest.mark.parametrize(("outputs", "inputs"), [(43008, 5376), (5376, 21504), (1152, 896), (64, 128)])
def test_groups_of_32_have_kernels_that_take_any_group(outputs: int, inputs: int) -> None:
    """Operands of the others have one scale for 64 inputs."""
    for rows in range(1, 300):
        for in_parts in (False, True):
            tile = int4_tile(rows, outputs, inputs, in_parts=in_parts, groups=4)
            if isinstance(tile, SkinnyTile):
                assert 1 < rows <= 128 and 1 <= tile.splits <= 8
                assert (tile.splits - 1) * tile.each < inputs // 128 <= tile.splits * tile.each
            else:
                assert isinstance(tile, RowTile) if rows == 1 else tile is None and rows > 128


@pytest.mark.parametrize("rows", [2, 9, 17, 33, 65])
@pytest.mark.parametrize(("outputs", "inputs"), [*QWEN3_14B.values(), (8192, 28672), (1152, 896), (64, 128)])
def test_spans_share_all_steps_and_run_at_the_same_time(outputs: int, inputs: int, rows: int) -> None:
    tile = int4_tile(rows, outputs, inputs, in_parts=True, groups=1)
    assert isinstance(tile, SpansTile)
    turns = -(-inputs // (128 * tile.ahead))
    count = outputs // (16 * tile.warps) * turns
    programs = -(-count // tile.each)
    at_once = min(REGISTERS // (32 * tile.warps * tile.registers), SHARED_MEMORY // (shared_memory(tile) + 1024))
    assert at_once >= 1 and programs <= 132 * at_once
    # The first program of a tile counts from the same turn as the kernel.
    parts = [{turn // tile.each for turn in range(first, first + turns)} for first in range(0, count, turns)]
    assert all(min(each) == number * turns // tile.each for number, each in enumerate(parts))
    assert max(map(len, parts)) == tile.parts <= 8


def shared_memory(tile: SpansTile) -> int:
    """Bytes of a program's shared memory."""
    return tile.slots * (tile.rows * tile.ahead * 128 * 2 + 8)


def test_a_model_with_weights_of_4_bits_launches_their_kernels() -> None:
    config = ModelConfig.parse({**BUILTIN_CONFIGS["qwen3-14b"], "num_hidden_layers": 2}, quantization="int4")
    launches = Launches()
    with launches.recorded(Architecture.parse("9.0a")):
        rehearse(config, EngineConfig(model="", device="cuda", max_running=64))
    kernels = {name.rpartition(".")[2] for name, _ in launches.keys}
    assert {"_int4_row", "_int4_spans", "_int4_batch", "_dequantize"} <= kernels


def test_a_model_with_experts_of_4_bits_launches_their_kernels() -> None:
    config = ModelConfig.parse({**BUILTIN_CONFIGS["qwen3-30b-a3b"], "num_hidden_layers": 2}, quantization="int4")
    # Four ranks would cut pieces of 128 inputs, so their experts have 16 bits.
    for ranks, kept in ((2, True), (4, False)):
        launches = Launches()
        with launches.recorded(Architecture.parse("9.0a")):
            rehearse(config, EngineConfig(model="", device="cuda", max_running=256, tensor_parallel=ranks))
        files = {name.split(".")[-2] for name, _ in launches.keys}
        assert ({"skinny_gluon", "int4_pairs_triton"} <= files) is kept
        assert weights_of_experts(launches) == {"*i32" if kept else "*bf16"}
        assert "grouped_gemm_triton" in files


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("rows", "name"), [(129, "gate_up"), (160, "qkv"), (256, "down")])
def test_the_kernel_for_a_batch_compiles_for_hopper(rows: int, name: str, groups: int) -> None:
    """It moves no weights between threads: its layouts assert that."""
    tile = int4_tile(rows, *QWEN3_14B[name], in_parts=name == "down", groups=1)
    assert isinstance(tile, BatchTile)
    types = {
        "x": map_type("bf16", tile.copied_rows, 64),
        "words": "*i32",
        "scales": "*i32",
        "bias": "*bf16",
        "out": "*bf16" if tile.splits == 1 else "*fp32",
    }
    constants = {"ROWS": tile.rows, "SLOTS": tile.slots, "AHEAD": tile.ahead, "GROUPS": groups}
    constants |= {"BIAS": tile.splits == 1, "PDL": True}
    kernel = compiled(_int4_batch, types, constants, default="i32", options={"num_warps": tile.outputs // 16})
    assert kernel.metadata.shared <= SHARED_MEMORY // 2


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("rows", "inputs"), [(2, 5120), (16, 896), (32, 17408), (64, 1408), (128, 5120)])
def test_the_kernel_for_spans_compiles_for_hopper(rows: int, inputs: int, groups: int) -> None:
    """It moves no weights between threads: its layouts assert that."""
    tile = int4_tile(rows, 5120, inputs, in_parts=True, groups=1)
    assert isinstance(tile, SpansTile)
    types = {"x": map_type("bf16", tile.rows, 128 * tile.ahead), "words": "*i32", "scales": "*i32", "out": "*fp32"}
    constants = {"STEPS": inputs // 128, "AHEAD": tile.ahead, "SLOTS": tile.slots, "GROUPS": groups, "PDL": True}
    options = {"num_warps": tile.warps, "maxnreg": tile.registers}
    kernel = compiled(_int4_spans, types, constants, default="i32", options=options)
    assert kernel.metadata.shared <= shared_memory(tile) + 1024


@pytest.mark.parametrize(
    ("inputs", "gated", "groups"),
    [
        *((*each, groups) for each in ((5120, True), (1408, False), (17408, False)) for groups in (1, 2)),
        (1408, True, 4),
    ],
)
def test_the_kernel_for_one_row_compiles_for_hopper(inputs: int, gated: bool, groups: int) -> None:
    tile = int4_tile(1, 5120, inputs, in_parts=False, groups=1)
    assert isinstance(tile, RowTile)
    types = dict.fromkeys(("x", "bias", "out"), "*bf16") | dict.fromkeys(("words", "scales"), "*i32")
    constants = {"INPUTS": inputs, "SPLITS": 1, "GROUPS": groups, "AHEAD": tile.ahead}
    constants |= {"GATED": gated, "BIAS": True, "PDL": True}
    assert compiled(_int4_row, types, constants, default="i32", options={"num_warps": tile.warps}).asm["cubin"]


def test_the_kernel_for_groups_of_32_compiles_for_hopper() -> None:
    types = {"x": "*bf16", "words": "*i32", "scales": "*i32", "out": "*fp32"}
    constants = {"STEPS": 42, "GROUPS": 4, "ROWS": 64, "PDL": True}
    # What is copied ahead takes the memory.
    kernel = compiled(_int4_skinny, types, constants, default="i32", aligned=types, options={"num_stages": 3})
    assert kernel.metadata.shared <= SHARED_MEMORY // 2


@pytest.mark.parametrize(
    ("hidden", "width", "groups", "top_k", "down_warps", "mxfp4"),
    [
        *((2048, width, groups, 8, 8, False) for width in (768, 384) for groups in (1, 2)),
        (2048, 768, 4, 8, 8, False),
        # gpt-oss: whole, and one of two ranks.
        (2880, 2880, 1, 4, 16, True),
        (2880, 1472, 1, 4, 8, True),
    ],
)
def test_the_kernels_for_experts_compile_for_hopper(
    hidden: int, width: int, groups: int, top_k: int, down_warps: int, mxfp4: bool
) -> None:
    types = dict.fromkeys(("x", "logits", "chosen", "bias", "out"), "*bf16") | {"weight": "*i32"}
    types |= {"scales": "*u8" if mxfp4 else "*i32"}
    sizes = {"HIDDEN": hidden, "WIDTH": width, "EXPERTS": 128, "BLOCK": 128, "TOP_K": top_k, "GROUPS": groups}
    sizes |= {"BIAS": mxfp4, "CHOSEN": False, "PDL": True}
    of_gate = {"ALPHA": 1.702, "LIMIT": 7.0 if mxfp4 else 0.0, "GELU": False, "GATED": True}
    assert gemv_gluon._down_warps(top_k * width, mxfp4) == down_warps
    for kernel, warps, more in (
        (gemv_gluon._gate_up, gemv_gluon._WARPS, of_gate),
        (gemv_gluon._down, down_warps, {"RENORMALIZE": mxfp4, "AHEAD": top_k}),
    ):
        assert compiled(kernel, types, sizes | more, options={"num_warps": warps}).asm["cubin"]


def test_the_kernel_for_pairs_of_experts_compiles_for_hopper() -> None:
    types = dict.fromkeys(("x", "rows"), "*bf16") | dict.fromkeys(("pairs", "tokens"), "i32")
    constants = {"EXPERTS": 128, "HIDDEN": 2048, "ROW": 2048, "BLOCK": 1024, "PDL": True}
    assert compiled(int4_pairs_triton._pairs_and_rows, types, constants).asm["cubin"]


def test_kernels_in_the_interpreter_agree_with_torch() -> None:
    cases = interpreted("support.kernels.interpreted_int4")
    assert cases and all(cases.values())
