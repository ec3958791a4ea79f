"""Selection of experts by scores in Triton's interpreter on a CPU, against the same function in torch.

Run `python -m support.kernels.interpreted_routing`. Prints, as JSON, whether each case agrees.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple

import torch

from minisgl.moe.routing import route_by_scores
from minisgl.moe.routing_config import RoutingConfig


class Case(NamedTuple):
    routing: RoutingConfig
    experts: int
    top_k: int
    dtype: torch.dtype = torch.float32


CASES: Final = {
    "sigmoid and bias": Case(
        RoutingConfig(scores="sigmoid", selection_bias=True, renormalize=True, smallest_sum=1e-20, scale=2.5), 128, 8
    ),
    "sigmoid without renormalization": Case(RoutingConfig(scores="sigmoid", scale=0.5), 160, 8),
    "softmax and bias": Case(RoutingConfig(selection_bias=True, renormalize=True, smallest_sum=1e-12), 64, 6),
    "a sum that is too small": Case(RoutingConfig(renormalize=True, smallest_sum=2.0), 6, 2),
    "odd numbers of experts in 16 bits": Case(RoutingConfig(scores="sigmoid", selection_bias=True), 7, 3, torch.half),
}


def draw(case: Case, tokens: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits and selection bias; no two scores of a token are equal."""
    generator = torch.Generator().manual_seed(case.experts)
    logits = torch.stack([torch.randperm(case.experts, generator=generator) for _ in range(tokens)])
    logits = (logits - case.experts / 2) / case.experts * 4
    bias = torch.randn(case.experts, generator=generator) if case.routing.selection_bias else None
    return logits.to(device, case.dtype), None if bias is None else bias.to(device)


def agrees(case: Case) -> bool:
    from minisgl.kernels.experts.routing_triton import route_by_scores_cuda

    logits, bias = draw(case, 5)
    expected, chosen = route_by_scores(logits, bias, case.top_k, case.routing)
    weights, experts = route_by_scores_cuda(
        logits,
        bias,
        case.top_k,
        sigmoid=case.routing.scores == "sigmoid",
        renormalize=case.routing.renormalize,
        smallest_sum=case.routing.smallest_sum,
        scale=case.routing.scale,
    )
    return experts.tolist() == chosen.tolist() and torch.allclose(weights, expected, rtol=1e-5, atol=1e-6)


def distinct(value: float) -> bool:
    """Whether logits that are all `value` select experts that exist, each once."""
    from minisgl.kernels.experts.routing_triton import route_by_scores_cuda

    options = {"sigmoid": True, "renormalize": True, "smallest_sum": 0.0, "scale": 1.0}
    _, experts = route_by_scores_cuda(torch.full((1, 6), value), torch.full((6,), value), 4, **options)  # type: ignore[arg-type]
    return len(set(experts[0].tolist()) & set(range(6))) == 4


if __name__ == "__main__":
    found = {name: agrees(case) for name, case in CASES.items()}
    found |= {str(value): distinct(value) for value in (0.0, float("nan"), float("inf"), float("-inf"))}
    print(json.dumps(found))
