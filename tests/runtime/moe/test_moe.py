from __future__ import annotations

import pytest
import torch

from minisgl.layers.activation import silu_and_mul
from minisgl.moe.experts import experts_dense, experts_grouped, experts_one_by_one
from minisgl.moe.mixture import route

TOKENS, HIDDEN, EXPERTS, INNER, TOP_K = 21, 32, 6, 16, 2


def weights(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator) * HIDDEN**-0.5
    down = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator) * INNER**-0.5
    return x.to(dtype), gate_up.to(dtype), down.to(dtype)


def test_routing_takes_the_most_probable_experts() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    chosen, experts = route(logits, 2, renormalize=False)
    assert experts.tolist() == [[1, 3]]
    torch.testing.assert_close(chosen, torch.softmax(logits, -1)[:, [1, 3]])
    chosen, _ = route(logits, 2, renormalize=True)
    torch.testing.assert_close(chosen, torch.softmax(torch.tensor([[3.0, 2.0]]), -1))


@pytest.mark.parametrize("crowded", [False, True], ids=["spread", "one expert for all"])
def test_grouped_and_dense_experts_match_the_reference(crowded: bool) -> None:
    x, gate_up, down = weights(torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    experts = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)])
    if crowded:
        experts[:] = torch.tensor([3, 0])
    expected = experts_one_by_one(x, experts, gate_up, down, silu_and_mul)
    rows, places = experts_grouped(x, experts, gate_up, down, silu_and_mul)
    torch.testing.assert_close(rows[places].view_as(expected), expected, rtol=2e-2, atol=2e-2)
    dense = experts_dense(x, experts, gate_up, down, silu_and_mul)
    torch.testing.assert_close(dense, expected, rtol=2e-2, atol=2e-2)
