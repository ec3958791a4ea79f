"""Beginning of a block: add its input to the residual stream, normalize the stream, and apply the first projection
(pre-norm, arXiv:2002.04745). For one row on CUDA that is one kernel; this file makes the decision."""

from __future__ import annotations

import torch

from minisgl.layers.activation import GatedActivation, silu_and_mul
from minisgl.layers.fp8_weight import Activations, Fp8Weight, takes_row
from minisgl.layers.int4_weight import Int4Weight
from minisgl.layers.linear import ColumnParallelLinear, linear
from minisgl.layers.new_weight import Weight
from minisgl.layers.norm import RMSNorm


def project(
    norm: RMSNorm, projection: ColumnParallelLinear, x: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` and `residual` [T, hidden] to the projection of their sum's norm, and the sum: the new residual stream.
    Without a residual `x` begins the stream. The caller must not use `residual` again."""
    if _is_one_kernel(x, projection.weight):
        return _in_one_kernel(norm, projection.weight, x, residual, bias=projection.bias)
    if isinstance(projection.weight, Fp8Weight):
        rows, residual = norm.forward_fp8(x, residual, per_row=projection.weight.per_channel)
        return projection.forward(rows), residual
    x, residual = norm.forward(x, residual)
    return projection.forward(x), residual


def project_gated(
    norm: RMSNorm,
    projection: ColumnParallelLinear,
    activation: GatedActivation,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    *,
    consumer: Weight,
) -> tuple[Activations, torch.Tensor]:
    """`project`, then the `activation` of the projection's output, quantized if its `consumer` has FP8 weights and
    takes it so."""
    weight = projection.weight
    if isinstance(weight, Int4Weight) and x.is_cuda and activation is silu_and_mul:
        from minisgl.kernels.int4_tiles import int4_gated

        normed, residual = norm.forward(x, residual)
        out = int4_gated(normed, weight.words, weight.scales, projection.bias)
        return silu_and_mul(projection.forward(normed)) if out is None else out, residual
    to_fp8 = isinstance(consumer, Fp8Weight) and not takes_row(x, consumer)
    if activation is silu_and_mul and not to_fp8 and _is_one_kernel(x, weight):
        return _in_one_kernel(norm, weight, x, residual, bias=projection.bias, gated=True)
    x, residual = project(norm, projection, x, residual)
    if isinstance(consumer, Fp8Weight) and to_fp8 and x.is_cuda and activation is silu_and_mul:
        from minisgl.kernels.fp8_rows_triton import silu_and_mul_fp8

        return silu_and_mul_fp8(x, per_row=consumer.per_channel), residual
    return activation(x), residual


def normalize_and_project(
    norm: RMSNorm, weight: torch.Tensor, x: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `project`, for callers that also use the norm: the norm, its product with `weight` [out, hidden], and the new
    residual stream."""
    if _is_one_kernel(x, weight):
        normed = torch.empty_like(x)
        product, residual = _in_one_kernel(norm, weight, x, residual, normed=normed)
        return normed, product, residual
    x, residual = norm.forward(x, residual)
    return x, linear(x, weight), residual


def _is_one_kernel(x: torch.Tensor, weight: Weight) -> bool:
    """Decide by shapes alone, so that a captured step can be replayed."""
    if isinstance(weight, Fp8Weight):
        return takes_row(x, weight)
    if isinstance(weight, Int4Weight) or not x.is_cuda:
        return False
    from minisgl.kernels.skinny_linear_triton import fits_normed

    return fits_normed(x, weight)


def _in_one_kernel(
    norm: RMSNorm,
    weight: Weight,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    *,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    normed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(weight, Fp8Weight):
        from minisgl.kernels.fp8_row_gluon import normed_fp8_row

        assert normed is None
        return normed_fp8_row(x, residual, norm.weight, norm.eps, weight.values, weight.scales, bias, gated=gated)
    assert isinstance(weight, torch.Tensor)
    from minisgl.kernels.skinny_linear_triton import normed_linear

    return normed_linear(x, residual, norm.weight, norm.eps, weight, bias, gated=gated, normed=normed)
