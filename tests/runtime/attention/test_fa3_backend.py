"""Segments that FlashAttention-3 gets, with a stand-in for its package. tests/gpu tests the kernels."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from minisgl.attention.fa3_backend import Fa3Prefill
from minisgl.attention.torch_backend import TorchDecode, TorchPrefill
from support.kernels.dense_attention import DenseCase, Sequences, attention_shape


def _varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_offsets: torch.Tensor,
    key_offsets: torch.Tensor,
    longest_query: int,
    longest_key: int,
    *,
    causal: bool,
) -> torch.Tensor:
    assert causal and torch.equal(query_offsets, key_offsets) and longest_query == longest_key
    lengths = query_offsets.diff().tolist()
    assert query_offsets[0] == 0 and sum(lengths) == len(q) and max(lengths) == longest_query
    parts = []
    for part in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        query, key, value = (x.transpose(0, 1)[None] for x in part)
        parts.append(F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True))
    return torch.cat([part[0].transpose(0, 1) for part in parts])


@pytest.mark.parametrize(
    ("segments", "served"),
    [
        (((0, 30), (0, 1), (0, 65)), 96),
        (((64, 20), (0, 30), (0, 5)), 35),
        (((0, 30), (64, 20), (0, 30), (16, 2), (0, 7)), 7),
        (((0, 30), (64, 20)), 0),
        (((64, 20),), 0),
    ],
)
def test_it_gets_the_segments_behind_the_last_continued_prompt(
    monkeypatch: pytest.MonkeyPatch, segments: tuple[tuple[int, int], ...], served: int
) -> None:
    seen = []

    def varlen(q: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        seen.append(len(q))
        return _varlen(q, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", SimpleNamespace(flash_attn_varlen_func=varlen))
    shape = attention_shape(
        query_heads=4, kv_heads=2, head_dim=16, page_size=16, longest=256, dtype=torch.float32, device="cpu"
    )
    case = DenseCase(shape, Sequences(decode=(5, 40), segments=segments))
    result = case.run(Fa3Prefill(shape, TorchPrefill(shape)), TorchDecode(shape))
    torch.testing.assert_close(result.double(), case.expected(), atol=1e-5, rtol=1e-5)
    assert seen == ([served] if served else [])
