"""The decoder against Hugging Face transformers: float32 on a CPU, every architecture and every variant of a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.toy.tiny import TINY_ARCHS, write_tiny_checkpoint
from support.numerics.compare import ROUNDED, distance
from support.numerics.ranks import all_logits, load, run_ranks

SEQUENCES = [
    [int(t) for t in torch.randint(0, 570, (n,), generator=torch.Generator().manual_seed(n))] for n in (160, 1, 37)
]

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{arch: (arch, {}) for arch in TINY_ARCHS},
    "llama, default rope, tied": ("llama", {"rope": "default", "tied": True}),
    "llama, linear rope": ("llama", {"rope": "linear"}),
    "llama, biases, gelu": (
        "llama",
        {"activation": "gelu", "config_extra": {"attention_bias": True, "mlp_bias": True}},
    ),
    "mistral, gelu tanh, wide heads": ("mistral", {"activation": "gelu_pytorch_tanh", "head_dim": 64}),
    "mistral, gelu new, one kv head": ("mistral", {"activation": "gelu_new", "kv_heads": 1}),
    "mistral, window within the sequence": ("mistral", {"config_extra": {"sliding_window": 20}}),
    "qwen2, yarn, untied": ("qwen2", {"rope": "yarn", "tied": False}),
    "qwen2, window beyond the sequence": (
        "qwen2",
        {"config_extra": {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 1}},
    ),
    "qwen3, yarn": ("qwen3", {"rope": "yarn"}),
    "qwen3, llama3 rope, bias": ("qwen3", {"rope": "llama3", "config_extra": {"attention_bias": True}}),
    "qwen3-moe, a dense layer, weights not renormalized": (
        "qwen3-moe",
        {"layers": 3, "config_extra": {"mlp_only_layers": [1], "norm_topk_prob": False}},
    ),
    "qwen3-moe, every other layer dense, tied": (
        "qwen3-moe",
        {"tied": True, "config_extra": {"decoder_sparse_step": 2}},
    ),
}


def reference_logits(checkpoint: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return torch.cat([model(torch.tensor([sequence])).logits[0] for sequence in SEQUENCES])


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    arch, options = VARIANTS[variant]
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", arch, **options)
    expected = reference_logits(checkpoint)
    ours = all_logits(load(checkpoint), SEQUENCES)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    assert (ours - expected).norm() / expected.norm() < 1e-5

    # Two ranks add in another order; that is all that may differ.
    def rank_logits(parallel: Any) -> tuple[torch.Tensor, int]:
        model = load(checkpoint, parallel)
        return all_logits(model, SEQUENCES, parallel), model.parameter_bytes

    if load(checkpoint).config.attention.num_kv_heads > 1:
        whole = load(checkpoint).parameter_bytes
        for logits, parameter_bytes in run_ranks(2, tmp_path, rank_logits):
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
            assert parameter_bytes <= 0.6 * whole


@pytest.mark.parametrize("arch", TINY_ARCHS)
def test_a_checkpoint_that_transformers_saved_is_read(arch: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = write_tiny_checkpoint(tmp_path / "ours", arch)
    saved = tmp_path / "theirs"
    AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).save_pretrained(saved)
    assert torch.equal(all_logits(load(saved), SEQUENCES), all_logits(load(checkpoint), SEQUENCES))


@pytest.mark.parametrize("arch", ["qwen2", "qwen3-moe"])
def test_ranks_exceed_kv_heads_and_the_vocabulary_does_not_divide(arch: str, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", arch, vocab=575)
    expected = all_logits(load(checkpoint), SEQUENCES)

    def rank_logits(parallel: Any) -> torch.Tensor:
        model = load(checkpoint, parallel)
        assert model.num_kv_heads_local == 1
        padded = parallel.all_gather_last_dim(model.local_logits(torch.ones(3, model.config.hidden_size)))
        assert padded.shape == (3, 576)
        assert padded.isfinite().all()
        assert (padded[:, 575] < padded[:, :575].amin(-1)).all()
        return all_logits(model, SEQUENCES, parallel)

    for logits in run_ranks(4, tmp_path, rank_logits):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arch", TINY_ARCHS)
def test_half_precision_is_close_to_float32(arch: str, dtype: torch.dtype, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, arch)
    exact = all_logits(load(checkpoint), SEQUENCES)
    rounded = all_logits(load(checkpoint, dtype=dtype), SEQUENCES)
    assert rounded.dtype == dtype
    assert distance(rounded, exact) < (ROUNDED if dtype is torch.bfloat16 else 2e-3)
