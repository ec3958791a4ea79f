"""Selection of the experts of each token."""

from __future__ import annotations

import torch


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
