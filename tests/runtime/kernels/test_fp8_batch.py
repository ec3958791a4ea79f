"""How programs share products of batches with FP8 weights, and compilation for Hopper. tests/gpu tests the results."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

pytest.importorskip("triton")

from hypothesis import given
from hypothesis import strategies as st

from minisgl.bench.builtin_configs import BUILTIN_CONFIGS
from minisgl.config import EngineConfig
from minisgl.engine.start.rehearsal import rehearse
from minisgl.engine.start.warm_up import _TOKENS
from minisgl.hopper import MULTIPROCESSORS, SHARED_MEMORY
from minisgl.kernels.build.triton import Architecture, Launches
from minisgl.kernels.linear.fp8_persistent_gluon import _REGISTERS, _STAGES, _fp8_batch, _room, fits, share
from minisgl.models.config import ModelConfig
from support.kernels.compiled_kernel import compiled, map_type

QWEN3_14B = {"qkv": (7168, 5120), "o": (5120, 5120), "gate_up": (34816, 5120), "down": (5120, 17408)}


@given(
    rows=st.integers(16, 9000),
    outputs=st.integers(1, 160).map(lambda number: 256 * number),
    blocks=st.integers(1, 200),
    programs=st.sampled_from([114, 132, 16]),
)
def test_each_block_of_each_tile_is_multiplied_once(rows: int, outputs: int, blocks: int, programs: int) -> None:
    work = share(rows, outputs, 128 * blocks, programs)
    assert (work.tall == 1) == (rows <= 64)
    tiles = -(-rows // (64 * work.tall)) * (outputs // (256 if work.tall == 1 else 128))
    assert work.whole + work.parts // work.splits == tiles
    assert work.parts % work.splits == 0
    if work.parts:
        # Programs wait for one another, so the parts of a tile must be among the first units of programs that all run.
        assert work.whole % programs == 0
        assert work.parts // work.splits < programs
        assert work.parts <= 2 * programs
        assert work.blocks % 4 == 0
        # No part is empty, and none but the last reaches behind the inputs.
        assert (work.splits - 1) * work.blocks < blocks <= work.splits * work.blocks


def test_it_takes_the_products_for_which_it_is_faster() -> None:
    def taken(rows: int) -> set[str]:
        return {name for name, shape in QWEN3_14B.items() if fits(rows, *shape, MULTIPROCESSORS)}

    assert taken(8) == set()
    assert taken(64) == {"gate_up"}
    assert taken(128) == {"qkv", "o", "gate_up", "down"}
    assert taken(129) == taken(192) == {"gate_up", "down"}
    assert taken(256) == set()
    assert taken(512) == {"o", "down"}
    assert taken(8192) == set()


def test_cublas_gets_no_scales_that_are_not_aligned() -> None:
    assert fits(256, 7168, 5120 + 128, MULTIPROCESSORS)


@pytest.mark.parametrize(("model", "ranks"), [("qwen3-14b", 1), ("qwen3-8b", 4), ("qwen3-0.6b", 1)])
def test_the_warm_up_launches_what_any_number_of_rows_needs(model: str, ranks: int) -> None:
    """Else a kernel would be compiled while requests wait."""
    config = ModelConfig.parse({**BUILTIN_CONFIGS[model], "num_hidden_layers": 2}, quantization="fp8-block")
    launches = Launches()
    with launches.recorded(Architecture.parse("9.0a")):
        rehearse(config, EngineConfig(model="", device="cuda", max_running=256, tensor_parallel=ranks))
    launched = [name for name, _ in launches.keys if name.endswith("_fp8_batch")]
    needed = _needed(config, ranks, (*range(2, 300), *range(300, 8193, 64)))
    assert len(launched) == len(needed)


def test_memory_of_a_recording_is_not_kept() -> None:
    """A start that compiles records its kernels first, with tensors that have no memory."""
    config = ModelConfig.parse({**BUILTIN_CONFIGS["qwen3-14b"], "num_hidden_layers": 1}, quantization="fp8-block")
    with Launches().recorded(Architecture.parse("9.0a")):
        rehearse(config, EngineConfig(model="", device="cuda", max_running=256))
    assert _room.cache_info().currsize == 0


@pytest.mark.parametrize("model", ["qwen3-14b", "qwen3-8b", "qwen3-32b", "llama-3.1-8b", "qwen3-0.6b"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_warm_ups_sizes_need_all_kernels_that_others_do(model: str, ranks: int) -> None:
    config = ModelConfig.parse(BUILTIN_CONFIGS[model], quantization="fp8-block")
    every = _needed(config, ranks, (*range(2, 300), *range(300, 8193, 64)))
    assert _needed(config, ranks, _TOKENS) == every


def _needed(config: ModelConfig, ranks: int, sizes: Iterable[int]) -> set[int]:
    """Groups of 64 rows in the tiles of a model's products, which select a variant of the kernel."""
    inner, heads = (
        config.layers[0].feed_forward.intermediate_size // ranks,
        config.attention.num_heads * config.attention.head_dim // ranks,
    )
    shapes = [
        (2 * inner, config.hidden_size),
        (config.hidden_size, inner),
        (heads + 2 * config.attention.num_kv_heads * config.attention.head_dim // ranks, config.hidden_size),
        (config.hidden_size, heads),
    ]
    # Ranks have weights of 16 bits where they would have a part of 128 inputs or outputs.
    shapes = [shape for shape in shapes if shape[0] % 128 == 0 and shape[1] % 128 == 0]
    return {
        share(rows, *shape, MULTIPROCESSORS).tall
        for rows in sizes
        for shape in shapes
        if fits(rows, *shape, MULTIPROCESSORS)
    }


@pytest.mark.parametrize("tall", [1, 2, 3])
def test_the_kernel_compiles_for_hopper(tall: int) -> None:
    types = {
        "x": map_type("fp8e4nv", 64, 128),
        "w": map_type("fp8e4nv", 128, 128),
        "x_scales": map_type("fp32", 1, 64, swizzle=0),
        "out_tiles": map_type("bf16", 64, 128),
        "w_scales": "*fp32",
        "out": "*bf16",
        "sums": "*fp32",
        "counters": "*i32",
    }
    constants = {"TALL": tall, "STAGES": _STAGES[tall], "PDL": True}
    kernel = compiled(
        _fp8_batch,
        types,
        constants,
        default="i32",
        aligned=("w_scales", "out", "sums", "counters", "inputs", "outputs"),
        options={"num_warps": 4, "maxnreg": _REGISTERS[tall]},
    )
    assert kernel.asm["cubin"]
    assert kernel.metadata.shared <= SHARED_MEMORY
