"""Weights that stay in 4 bits."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from minisgl.kernels.int4_words import INPUTS, OUTPUTS, PIECE, dequantize_words


class Int4Weight(NamedTuple):
    """W [out, in], or that of each expert [experts, out, in], in groups of inputs that share a scale and a zero point;
    see `kernels/int4_words.py`."""

    words: torch.Tensor
    """[…, out / 64, in * 8] int32."""
    scales: torch.Tensor
    """[…, out / 64, groups * 64] int32."""

    @property
    def shape(self) -> torch.Size:
        *experts, blocks, words = self.words.shape
        return torch.Size((*experts, blocks * OUTPUTS, words // PIECE * INPUTS))

    def dequantized(self) -> torch.Tensor:
        """[…, out, in] in bfloat16."""
        words, scales = self.words.flatten(0, -2), self.scales.flatten(0, -2)
        if words.is_cuda:
            from minisgl.kernels.int4_dequantize_triton import dequantize_words_cuda

            return dequantize_words_cuda(words, scales).view(self.shape)
        return dequantize_words(words, scales).view(self.shape)


def int4_product(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None = None, *, in_parts: bool = False
) -> torch.Tensor:
    """[T, in], [out, in] and [out] to [T, out] or, with `in_parts` and no bias, to partial sums [parts, T, out] in
    float32."""
    if not len(x):
        return x.new_empty(0, weight.shape[0])
    if x.is_cuda:
        from minisgl.kernels.int4_tiles import int4_linear, int4_tile

        in_parts = in_parts and bias is None
        tile = int4_tile(len(x), *weight.shape, in_parts=in_parts)
        if tile is not None:
            return int4_linear(x.contiguous(), weight.words, weight.scales, tile, bias, in_parts=in_parts)
    return F.linear(x, weight.dequantized().to(x.dtype), bias)
