"""The experts' kernels by Triton's interpreter; on a GPU `tests/gpu/test_experts.py` tests them."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.config import EngineConfig
from minisgl.engine.start.rehearsal import rehearse
from minisgl.hopper import SHARED_MEMORY
from minisgl.kernels.build.triton import Architecture, Launches
from minisgl.kernels.experts import grouped_gemm_triton, skinny_gluon
from minisgl.kernels.experts.grouped_gemm_triton import Tiles, choose_tiles
from minisgl.models.config import ModelConfig
from support.kernels.compiled_kernel import compiled
from support.kernels.interpreted_experts import CASES
from support.kernels.interpreter import interpreted


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    found: dict[str, float] = interpreted("support.kernels.interpreted_experts")
    return found


@pytest.mark.parametrize("name", CASES)
def test_experts_match_float64(name: str, errors: dict[str, float]) -> None:
    assert errors[name] < 1e-3


def test_experts_without_gates_are_run_by_kernels() -> None:
    given = BUILTIN_CONFIGS["nemotron-3-nano"]
    config = ModelConfig.parse({**given, "hybrid_override_pattern": "ME*", "num_hidden_layers": 3})
    launches = Launches()
    with launches.recorded(Architecture.parse("9.0a")):
        rehearse(config, EngineConfig(model="", device="cuda", max_running=256))
    names = {name.removeprefix("minisgl.kernels.experts.") for name, _ in launches.keys}
    assert {
        f"{file}.{kernel}" for file in ("gemv_gluon", "grouped_gemm_triton") for kernel in ("_gate_up", "_down")
    } <= names


@pytest.mark.parametrize(("architecture", "shared_memory"), [(80, 163 << 10), (89, 99 << 10), (90, SHARED_MEMORY)])
@pytest.mark.parametrize("width", [768, 96])
@pytest.mark.parametrize("pairs_per_expert", [8, 16, 32, 100])
def test_tiles_fit_into_shared_memory(pairs_per_expert: int, width: int, architecture: int, shared_memory: int) -> None:
    compile_kernels(choose_tiles(pairs_per_expert, width), width, architecture, shared_memory)


@pytest.mark.parametrize("pairs_per_expert", [8, 16, 32, 100])
def test_tiles_of_experts_without_gates_fit_into_shared_memory(pairs_per_expert: int) -> None:
    tiles = choose_tiles(pairs_per_expert, 1856)
    compile_kernels(tiles, 1856, 90, SHARED_MEMORY, hidden=2688, gated=False)


@pytest.mark.parametrize("width", [768, 128])
@pytest.mark.parametrize("pairs_per_expert", [8, 16, 32, 100])
def test_tiles_of_experts_in_fp8_fit_into_shared_memory(pairs_per_expert: int, width: int) -> None:
    types = {"weight": "*fp8e4nv", "scales": "*fp32"}
    compile_kernels(choose_tiles(pairs_per_expert, width, quantized=True), width, 90, SHARED_MEMORY, types, scaled=128)


@pytest.mark.parametrize(
    ("pairs_per_expert", "groups"), [*((pairs, groups) for pairs in (8, 16, 32) for groups in (1, 2)), (32, 4)]
)
def test_tiles_of_experts_in_int4_fit_into_shared_memory(pairs_per_expert: int, groups: int) -> None:
    types = {"weight": "*i32", "scales": "*i32"}
    compile_kernels(choose_tiles(pairs_per_expert, 768, quantized=True), 768, 90, SHARED_MEMORY, types, groups=groups)


@pytest.mark.parametrize("pairs_per_expert", [8, 16, 32])
def test_tiles_of_experts_in_mxfp4_fit_into_shared_memory(pairs_per_expert: int) -> None:
    types = {"weight": "*i32", "scales": "*u8"}
    tiles = choose_tiles(pairs_per_expert, 2880, quantized=True)
    compile_kernels(tiles, 2880, 90, SHARED_MEMORY, types, groups=4, hidden=2880, limit=7.0)


@pytest.mark.parametrize(
    ("hidden", "width", "kind"),
    [
        *((2048, width, kind) for width in (768, 384) for kind in ("FP8", "INT4 by 128", "INT4 by 64")),
        (2048, 768, "INT4 by 32"),
        # gpt-oss: whole, and one of two ranks.
        (2880, 2880, "MXFP4"),
        (2880, 1472, "MXFP4"),
    ],
)
def test_the_kernels_for_rows_of_experts_compile_for_hopper(hidden: int, width: int, kind: str) -> None:
    """They move no weights or inputs between threads: their layouts assert that."""
    types = dict.fromkeys(("x", "bias", "out"), "*bf16") | {"words": "*i32", "scales": "*i32", "tokens": "i32"}
    types |= {"FP8": {"words": "*fp8e4nv", "scales": "*fp32"}, "MXFP4": {"scales": "*u8"}}.get(kind, {})
    groups, registers = {
        "FP8": (0, skinny_gluon._FP8_REGISTERS),
        "INT4 by 64": (2, skinny_gluon._INT4_REGISTERS),
        "INT4 by 32": (4, skinny_gluon._INT4_REGISTERS),
        "MXFP4": (1, skinny_gluon._FP4_REGISTERS),
    }.get(kind, (1, skinny_gluon._INT4_REGISTERS))
    sizes = {"GROUPS": groups, "BIAS": kind == "MXFP4", "PDL": True}
    row = -(-width // 128) * 128
    of_gate = {"INPUTS": -(-hidden // 128) * 128, "WIDTH": width, "ROW": row, "TOP_K": 8}
    of_gate |= {"ALPHA": 1.702, "LIMIT": 7.0 if kind == "MXFP4" else 0.0}
    options = {"num_warps": skinny_gluon._WARPS, "maxnreg": registers}
    for kernel, more in (
        (skinny_gluon._gate_up, of_gate),
        (skinny_gluon._down, {"INPUTS": row, "HIDDEN": hidden}),
    ):
        assert compiled(kernel, types, sizes | more, options=options).asm["cubin"]


def compile_kernels(
    tiles: Tiles,
    width: int,
    architecture: int,
    shared_memory: int,
    weight_types: dict[str, str] | None = None,
    *,
    scaled: int = 0,
    groups: int = 0,
    hidden: int = 2048,
    limit: float = 0.0,
    gated: bool = True,
) -> None:
    """`limit`: that of the activation; then there are biases."""
    common = {"WIDTH": width, "ROWS": tiles.rows, "SCALED": scaled, "GROUPS": groups, "PDL": architecture >= 90}
    common |= {"BIAS": limit > 0}
    for kernel, sizes in (
        (
            grouped_gemm_triton._gate_up,
            {
                "INPUTS": hidden,
                "TOP_K": 8,
                "BLOCK_N": tiles.gate_up_outputs,
                "BLOCK_K": tiles.gate_up_inputs,
                "ALPHA": 1.702,
                "LIMIT": limit,
                "GELU": False,
                "GATED": gated,
            },
        ),
        (grouped_gemm_triton._down, {"OUTPUTS": hidden, "BLOCK_N": tiles.down_outputs, "BLOCK_K": tiles.down_inputs}),
    ):
        constants = common | sizes
        types = dict.fromkeys(("x", "weight", "scales", "bias", "out"), "*bf16") | {"tokens": "i32"}
        types |= weight_types or {}
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        # What is copied ahead takes the memory.
        pointers = ("x", "pairs_of", "counts", "weight", "out")
        result = compiled(kernel, types, constants, aligned=pointers, architecture=architecture, options=options)
        assert 0 < result.metadata.shared <= shared_memory
