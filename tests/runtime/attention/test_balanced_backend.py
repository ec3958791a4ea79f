"""Rows that the balanced backend leaves to another one. tests/gpu tests the kernel."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from minisgl.attention.balanced_backend import FEWEST_ROWS, BalancedDecode
from minisgl.attention.torch_backend import TorchDecode, TorchPrefill
from support.kernels.dense_attention import DenseCase, Sequences, attention_shape


@pytest.mark.parametrize(
    "sequences",
    [
        Sequences(decode=[5, 90, 64]),
        Sequences(decode=[7] * 2 * FEWEST_ROWS, segments=[(0, 20)]),
    ],
    ids=["few rows", "beside a prompt"],
)
def test_the_other_backend_serves_few_rows_and_prefill_steps(sequences: Sequences) -> None:
    shape = attention_shape(
        query_heads=4, kv_heads=2, head_dim=64, page_size=16, longest=128, dtype=torch.float32, device="cpu"
    )
    case = DenseCase(shape, sequences)
    result = case.run(TorchPrefill(shape), BalancedDecode(shape, TorchDecode(shape)))
    assert torch.equal(result, case.run(TorchPrefill(shape), TorchDecode(shape)))
