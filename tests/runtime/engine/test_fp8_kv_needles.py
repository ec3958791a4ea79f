"""Retrieval from a context of 4,096 tokens with a KV cache in FP8; `tests/gpu/test_fp8_kv_long.py` has 65,536."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.config import EngineArgs
from support.numerics import rounded_kv
from support.numerics.needles import Haystack, found_by_engine, found_in_float32, haystack, write_retrieval_model
from support.numerics.ranks import load

DEPTHS = 16
LENGTH = 4096
STACKS = [haystack(LENGTH, DEPTHS, seed) for seed in range(2)]
NEEDLES = DEPTHS * len(STACKS)


@pytest.fixture(scope="module")
def retrieval_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_retrieval_model(tmp_path_factory.mktemp("needles"))


def test_an_fp8_cache_finds_at_least_as_many_needles_as_a_16_bit_one(retrieval_model: Path) -> None:
    options = EngineArgs(num_pages=300, max_step_tokens=1024, max_running=DEPTHS)
    plain = found_by_engine(retrieval_model, STACKS, "cpu", options)
    fp8 = found_by_engine(retrieval_model, STACKS, "cpu", options | EngineArgs(kv_cache_dtype="fp8"))
    assert fp8 >= plain >= 0.95 * NEEDLES


def test_coarser_caches_lose_needles(retrieval_model: Path) -> None:
    """Otherwise the model would not tell caches apart."""
    model = load(retrieval_model)
    exact, coarse = rounded_kv.exact, rounded_kv.two_bits
    found = found_in_float32(model, STACKS, rounded_kv.rounded(exact, exact))
    assert found >= 0.95 * NEEDLES
    assert found_in_float32(model, STACKS, rounded_kv.rounded(coarse, exact)) < found / 2


def test_a_haystack_has_its_needles_at_equal_distances() -> None:
    stack: Haystack = STACKS[0]
    assert len(stack.context) == LENGTH and len(set(stack.chain)) == DEPTHS
    assert stack.answer(DEPTHS - 2, 3) == [stack.chain[-1], stack.chain[0], stack.chain[1]]
    assert [prompt[-1] for prompt in stack.prompts()] == list(stack.chain)
