"""A KV cache in FP8 at long contexts: logits against models in float32, and retrieval against a cache in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl.config import EngineArgs
from support.numerics import rounded_kv
from support.numerics.gpu_engine import engine_config
from support.numerics.long_context import measure, write_sharp_checkpoint
from support.numerics.needles import found_by_engine, found_in_float32, haystack, write_retrieval_model
from support.numerics.ranks import load

CONTEXT = 32_768
DEPTHS = 16
STACKS = [haystack(65_536, DEPTHS, seed) for seed in range(4)]
NEEDLES = DEPTHS * len(STACKS)


@pytest.fixture(scope="module")
def retrieval_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_retrieval_model(tmp_path_factory.mktemp("needles"))


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_logits_behind_32k_tokens_are_close_to_those_of_the_same_quantization_in_float32(
    arch: str, tmp_path: Path
) -> None:
    checkpoint = write_sharp_checkpoint(tmp_path, arch, CONTEXT + 64)
    prompt = torch.randint(3, 500, (CONTEXT,), generator=torch.Generator().manual_seed(0)).tolist()
    config = engine_config(
        checkpoint, num_pages=800, max_running=4, max_step_tokens=8192, kv_cache_dtype="fp8", audit=True
    )
    distances = measure(config, prompt, shared=24_576, steps=16)
    print(arch, distances)
    assert distances.to_taken_over < 0.02
    assert distances.of_engine < 1.2 * distances.of_quantization


# One row alone, rows that share a prefix, and rows of which each has computed the whole context itself.
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("alone", EngineArgs(max_running=1)),
        ("shared", EngineArgs(max_running=DEPTHS)),
        ("separate", EngineArgs(max_running=DEPTHS, cache="naive")),
    ],
)
def test_an_fp8_cache_finds_at_least_as_many_needles_in_64k_tokens_as_one_in_bfloat16(
    name: str, options: EngineArgs, retrieval_model: Path
) -> None:
    stacks = STACKS[:1] if name == "separate" else STACKS
    needles = DEPTHS * len(stacks)
    # Whole contexts of all rows, or of all stacks.
    options = options | EngineArgs(num_pages=17_500 if name == "separate" else 5_000, cuda_graph_max_tokens=0)
    plain = found_by_engine(retrieval_model, stacks, "cuda", options)
    fp8 = found_by_engine(retrieval_model, stacks, "cuda", options | EngineArgs(kv_cache_dtype="fp8"))
    print(f"{name}: bfloat16 {plain}, FP8 {fp8} of {needles}")
    assert fp8 >= plain >= 0.95 * needles


def test_coarser_caches_lose_needles(retrieval_model: Path) -> None:
    """Otherwise the model would not tell caches apart."""
    model = load(retrieval_model, device="cuda")
    exact = rounded_kv.exact
    found = {
        "exact": found_in_float32(model, STACKS, rounded_kv.rounded(exact, exact)),
        "bfloat16": found_in_float32(model, STACKS, rounded_kv.rounded(rounded_kv.bfloat16, rounded_kv.bfloat16)),
        "e4m3": found_in_float32(model, STACKS, rounded_kv.rounded(rounded_kv.e4m3, rounded_kv.e4m3)),
        "e5m2": found_in_float32(model, STACKS, rounded_kv.rounded(rounded_kv.e5m2, rounded_kv.e5m2)),
        "keys in two bits": found_in_float32(model, STACKS, rounded_kv.rounded(rounded_kv.two_bits, exact)),
    }
    print(f"in float32, of {NEEDLES}: {found}")
    assert found["exact"] >= 0.95 * NEEDLES
    assert found["keys in two bits"] < found["exact"] / 2
