"""Packed attention and whole models that pool on a GPU, against the same on a CPU in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl.attention.packed import PackedAttention
from minisgl.attention.packed_shape import PackedShape
from minisgl.kernels.attention.rotation import Rotation
from support.numerics.encoder_checkpoints import TEXTS, Served, cosines, write_embedder

LENGTHS = (512, 3, 1, 700, 129, 64, 65, 300)


def attention(shape: PackedShape, dtype: torch.dtype, device: str) -> PackedAttention:
    made = PackedAttention([shape], [0], dtype, torch.device(device))
    host = np.array(LENGTHS, np.int32)
    made.begin(torch.from_numpy(np.concatenate(([0], host.cumsum())).astype(np.int32)).to(device), host)
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 16, 64), (16, 8, 128), (3, 1, 256), (12, 12, 32)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 65, 257])
def test_packed_attention_is_that_of_a_cpu(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, causal: bool, window: int | None
) -> None:
    shape = PackedShape(heads, kv_heads, head_dim, head_dim**-0.5, causal, window)
    tokens, generator = sum(LENGTHS), torch.Generator().manual_seed(0)
    fused = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
    angles = torch.rand(tokens, head_dim // 2, generator=generator) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    sizes = [heads, kv_heads, kv_heads]
    q, k, v = torch.split(fused, sizes, dim=1)
    exact = attention(shape, torch.float32, "cpu").attend(0, q.float(), k.float(), v.float(), Rotation(cos_sin))
    on_gpu = torch.split(fused.cuda(), sizes, dim=1)
    found = attention(shape, dtype, "cuda").attend(0, on_gpu[0], on_gpu[1], on_gpu[2], Rotation(cos_sin.cuda()))
    bound = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}[dtype]
    assert (found.cpu().float() - exact).norm() <= bound * exact.norm()
    plain = attention(shape, dtype, "cuda").attend(0, on_gpu[0], on_gpu[1], on_gpu[2], None).cpu().float()
    unturned = attention(shape, torch.float32, "cpu").attend(0, q.float(), k.float(), v.float(), None)
    assert (plain - unturned).norm() <= bound * unturned.norm()


def test_softcaps_are_applied() -> None:
    shape = replace(PackedShape(8, 4, 64, 0.3, False), softcap=2.0)
    fused = torch.randn(sum(LENGTHS), 16, 64, generator=torch.Generator().manual_seed(1))
    q, k, v = torch.split(fused, [8, 4, 4], dim=1)
    exact = attention(shape, torch.float32, "cpu").attend(0, q, k, v, None)
    q, k, v = torch.split(fused.bfloat16().cuda(), [8, 4, 4], dim=1)
    found = attention(shape, torch.bfloat16, "cuda").attend(0, q, k, v, None).cpu().float()
    assert (found - exact).norm() <= 2e-2 * exact.norm()


@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "modernbert", "nomic-bert", "gte", "embedding-gemma", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_embeddings_are_those_of_a_cpu(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    write_embedder(tmp_path, name)
    exact = Served(tmp_path).outputs(TEXTS)
    served = Served(tmp_path, dtype=dtype, device="cuda")
    packed = served.outputs(TEXTS).cpu()
    assert cosines(packed, exact).min() > (0.99 if dtype == torch.bfloat16 else 0.99999)
    alone = torch.cat([served.outputs([text]) for text in TEXTS]).cpu()
    assert cosines(packed, alone).min() > (0.999 if dtype == torch.bfloat16 else 0.99999)


def test_a_forward_pass_does_not_wait_for_the_device(tmp_path: Path) -> None:
    write_embedder(tmp_path, "embedding-gemma")
    served = Served(tmp_path, dtype=torch.bfloat16, device="cuda")
    host = np.array([len(text) for text in TEXTS], np.int32)
    offsets = torch.from_numpy(np.concatenate(([0], host.cumsum())).astype(np.int32)).cuda()
    tokens = torch.tensor([token for text in TEXTS for token in text], dtype=torch.int32).cuda()
    positions = torch.cat([torch.arange(length, dtype=torch.int32) for length in host]).cuda()

    @torch.inference_mode()
    def step() -> torch.Tensor:
        served.attention.begin(offsets, host)
        hidden = served.model.forward(tokens, positions, served.attention)
        return served.pooler.output(served.pooler.take(hidden, offsets))

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert step().shape == (len(TEXTS), served.pooling.output_size)
    finally:
        torch.cuda.set_sync_debug_mode("default")
