"""Whole engines with a KV cache in FP8."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl import LLM, SamplingParams
from minisgl.toy.tiny import write_tiny_checkpoint
from support.numerics.family_checkpoints import write_family_checkpoint

PROMPTS = [[5 + (i * 7 + row) % 90 for i in range(3 + 7 * row)] for row in range(6)]


def _tokens(checkpoint: Path, *, max_step_tokens: int, num_pages: int) -> tuple[list[list[int]], int]:
    with LLM(
        str(checkpoint), device="cpu", detokenize=False, kv_cache_dtype="fp8", page_size=4, num_pages=num_pages,
        max_running=8, max_step_tokens=max_step_tokens, audit=True,
    ) as llm:  # fmt: skip
        params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        outputs = llm.generate(PROMPTS, [params] * len(PROMPTS))
        return [list(output.token_ids) for output in outputs], llm.stats.kv_pool_bytes


def test_tokens_do_not_depend_on_the_cuts_of_prompts_or_on_preemption(checkpoint: Path) -> None:
    whole, _ = _tokens(checkpoint, max_step_tokens=512, num_pages=200)
    cut, _ = _tokens(checkpoint, max_step_tokens=16, num_pages=200)
    # Six answers need 90 pages.
    preempted, _ = _tokens(checkpoint, max_step_tokens=64, num_pages=30)
    assert whole == cut == preempted


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "gemma4, shared layers", "gpt-oss"])
def test_tokens_behind_windows_do_not_depend_on_cuts_or_on_preemption(family: str, tmp_path: Path) -> None:
    """Windows of 12 tokens or less, whose pages hold NaN once they are released."""
    checkpoint = write_family_checkpoint(tmp_path, family)
    whole, _ = _tokens(checkpoint, max_step_tokens=512, num_pages=200)
    cut, _ = _tokens(checkpoint, max_step_tokens=16, num_pages=200)
    preempted, _ = _tokens(checkpoint, max_step_tokens=64, num_pages=30)
    assert whole == cut == preempted


@pytest.mark.parametrize(("exponent", "same"), [(-2, True), (-16, False)])
def test_scales_of_the_checkpoint_are_applied(exponent: int, same: bool, tmp_path: Path) -> None:
    """A power of two moves the exponent of what is stored and changes nothing, until large numbers exceed e4m3's."""
    plain, scaled = write_tiny_checkpoint(tmp_path / "plain", "qwen3"), tmp_path / "scaled"
    shutil.copytree(plain, scaled)
    scale = torch.tensor([2.0**exponent])
    names = [f"model.layers.{layer}.self_attn.{each}_scale" for layer in range(2) for each in "kv"]
    weights = load_file(plain / "model.safetensors")
    save_file(weights | {name: scale.clone() for name in names}, scaled / "model.safetensors")
    expected, _ = _tokens(plain, max_step_tokens=512, num_pages=200)
    assert (_tokens(scaled, max_step_tokens=512, num_pages=200)[0] == expected) == same


def test_the_cache_takes_one_byte_per_number(checkpoint: Path) -> None:
    _, num_bytes = _tokens(checkpoint, max_step_tokens=512, num_pages=50)
    with LLM(str(checkpoint), device="cpu", page_size=4, num_pages=50, max_running=8) as llm:
        assert num_bytes == llm.stats.kv_pool_bytes // 4
