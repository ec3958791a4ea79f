"""Selection of the experts of each token."""

from __future__ import annotations

import torch

from minisgl.moe.routing_config import RoutingConfig


def route(router_logits: torch.Tensor, top_k: int, *, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, E] to (weights [T, K] in the logits' dtype, expert ids [T, K] int32 or int64).

    Probabilities are taken in float32 over all experts; `renormalize` makes the selected ones sum to 1.
    """
    if router_logits.is_cuda and router_logits.dtype in (torch.bfloat16, torch.float16):
        from minisgl.kernels.experts.routing_gluon import MAX_EXPERTS, route_cuda

        if router_logits.shape[1] <= MAX_EXPERTS:
            return route_cuda(router_logits, top_k, renormalize=renormalize)
    probabilities = torch.softmax(router_logits, dim=-1, dtype=torch.float32)
    weights, experts = torch.topk(probabilities, top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(router_logits.dtype), experts


def route_by_scores(
    router_logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, routing: RoutingConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, E] of any float type, and the selection bias [E] float32 if there is one, to (weights [T, K] float32, expert
    ids [T, K] int32 or int64)."""
    if router_logits.is_cuda:
        from minisgl.kernels.experts.routing_triton import MAX_EXPERTS, route_by_scores_cuda

        if router_logits.shape[1] <= MAX_EXPERTS:
            return route_by_scores_cuda(
                router_logits,
                bias,
                top_k,
                sigmoid=routing.scores == "sigmoid",
                renormalize=routing.renormalize,
                smallest_sum=routing.smallest_sum,
                scale=routing.scale,
            )
    logits = router_logits.float()
    scores = torch.sigmoid(logits) if routing.scores == "sigmoid" else torch.softmax(logits, dim=-1)
    experts = torch.topk(scores if bias is None else scores + bias, top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if routing.renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=routing.smallest_sum)
    return weights * routing.scale, experts
