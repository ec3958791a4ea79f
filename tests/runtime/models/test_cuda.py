"""Models on a GPU: what a CPU cannot show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.distributed.tensor_parallel import TensorParallel
from minisgl.layers.activation import silu_and_mul
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder
from minisgl.models.random_weights import fill_random
from minisgl.moe.experts import experts_dense, experts_grouped, experts_one_by_one
from minisgl.toy.tiny import TINY_ARCHS, write_tiny_checkpoint
from support.kernels.sequence_attention import SequenceAttention
from support.numerics.compare import ROUNDED, distance
from support.numerics.ranks import all_logits, load
from support.wide_checkpoint import write_wide_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SEQUENCES = [[3, 1, 4, 1, 5, 9, 2, 6], list(range(100, 160)), [7], [token * 31 % 570 for token in range(900)]]


@pytest.mark.parametrize("write", [write_tiny_checkpoint, write_wide_checkpoint])
@pytest.mark.parametrize("arch", TINY_ARCHS)
def test_logits_match_a_cpu(arch: str, write: Callable[[Path, str], Path], tmp_path: Path) -> None:
    checkpoint = write(tmp_path, arch)
    expected = all_logits(load(checkpoint), SEQUENCES)
    exact = all_logits(load(checkpoint, device="cuda"), SEQUENCES).cpu()
    torch.testing.assert_close(exact, expected, rtol=1e-3, atol=1e-3)
    rounded = distance(all_logits(load(checkpoint, dtype=torch.bfloat16, device="cuda"), SEQUENCES), expected)
    assert rounded <= ROUNDED

    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, attn_implementation="eager")
    theirs = theirs.eval().cuda()
    with torch.inference_mode():
        logits = torch.cat([theirs(torch.tensor([sequence]).cuda()).logits[0] for sequence in SEQUENCES])
    assert rounded <= 1.5 * distance(logits, expected)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("arch", TINY_ARCHS)
def test_few_rows_of_a_wide_model_match_a_cpu(arch: str, rows: int, tmp_path: Path) -> None:
    """80 tokens, `rows` at a time. A single row may have a larger error."""
    checkpoint = write_wide_checkpoint(tmp_path, arch)
    sequences = [[100 + row] for row in range(80)]
    expected = all_logits(load(checkpoint), sequences)
    model = load(checkpoint, dtype=torch.bfloat16, device="cuda")
    rounded = torch.cat([all_logits(model, sequences[at : at + rows]) for at in range(0, 80, rows)])
    assert distance(rounded, expected) <= ROUNDED


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("arch", TINY_ARCHS)
@torch.inference_mode()
def test_a_captured_step_equals_an_eager_one(arch: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = load(write_tiny_checkpoint(tmp_path, arch), dtype=dtype, device="cuda")
    tokens = torch.zeros(8, dtype=torch.int32, device="cuda")
    positions = torch.arange(8, dtype=torch.int32, device="cuda")

    def step() -> torch.Tensor:
        return model.local_logits(model.forward(tokens, positions, SequenceAttention([1] * 8, model.config.layers)))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    # Other tokens choose other experts: nothing of the captured run's choice may be frozen in the graph.
    for start in (0, 100, 300):
        tokens.copy_(torch.arange(start, start + 8, device="cuda"))
        graph.replay()
        torch.testing.assert_close(captured, step(), rtol=0, atol=0)


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_grouped_and_dense_experts_match_the_reference(tokens: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)
    gate_up = (torch.randn(16, 2 * 96, 256, device="cuda") / 16).bfloat16()
    down = (torch.randn(16, 256, 96, device="cuda") / 10).bfloat16()
    experts = torch.stack([torch.randperm(16, device="cuda")[:4] for _ in range(tokens)])
    expected = experts_one_by_one(x, experts, gate_up, down, silu_and_mul)
    rows, places = experts_grouped(x, experts, gate_up, down, silu_and_mul)
    torch.testing.assert_close(rows[places].view_as(expected), expected, rtol=3e-2, atol=3e-2)
    dense = experts_dense(x, experts, gate_up, down, silu_and_mul)
    torch.testing.assert_close(dense, expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("arch", TINY_ARCHS)
def test_random_weights_give_finite_logits(arch: str, tmp_path: Path) -> None:
    config = ModelConfig.read(write_tiny_checkpoint(tmp_path, arch))
    model = Decoder(config, TensorParallel(), torch.bfloat16, "cuda")
    fill_random(model.parameters)
    assert all_logits(model, SEQUENCES).isfinite().all()
