"""Interface of attention for model layers."""

from __future__ import annotations

from typing import Protocol

import torch

from minisgl.kernels.attention.rotation import Rotation
from minisgl.kernels.pointwise.fp8_rows import Fp8Rows


class Attention(Protocol):
    """Attention over the batch of one step. Only this object knows which token belongs to which sequence."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotation: Rotation,
        *,
        may_quantize: bool = False,
    ) -> torch.Tensor | Fp8Rows:
        """Apply `rotation` to q [T, Hq, D] and k [T, Hkv, D], store k and v [T, Hkv, D] in the KV pool, then attend
        causally. The last two dimensions of the three are contiguous.

        T tokens in the order of the step: decode rows first, then the prefill segments one after the other.
        Returns [T, Hq * D] in q's dtype or, if it `may_quantize` and can do so without a kernel more, in FP8 with a
        scale per 128 numbers.
        """
        ...
