from __future__ import annotations

import pytest
import torch

from minisgl.layers.activation import silu_and_mul
from minisgl.moe.experts import experts_dense, experts_grouped, experts_one_by_one
from minisgl.moe.routing import route, route_by_scores
from minisgl.moe.routing_config import RoutingConfig

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


def test_a_bias_selects_experts_but_has_no_part_in_their_weights() -> None:
    logits, bias = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([0.0, -9.0, 0.0, 9.0])
    routing = RoutingConfig(scores="sigmoid", selection_bias=True, scale=3.0)
    weights, experts = route_by_scores(logits, bias, 2, routing)
    assert experts.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, 3 * torch.sigmoid(logits[:, [3, 0]]))


def test_weights_are_renormalized_before_they_are_scaled_by_a_sum_that_is_not_too_small() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    scores = torch.softmax(logits, -1)[:, :2]
    for least, divisor in ((0.0, scores.sum()), (5.0, 5.0)):
        routing = RoutingConfig(renormalize=True, smallest_sum=least, scale=2.0)
        torch.testing.assert_close(route_by_scores(logits, None, 2, routing)[0], 2 * scores / divisor)


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
