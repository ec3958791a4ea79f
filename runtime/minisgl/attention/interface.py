"""Interface of attention for model layers."""

from __future__ import annotations

from typing import Protocol

import torch

from minisgl.kernels.attention.rotation import Rotation


class Attention(Protocol):
    """Attention over the batch of one step. Only this object knows which token belongs to which sequence."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        rotation: Rotation,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Apply `rotation` to q [T, Hq, D] and k [T, Hkv, D], store k and v [T, Hkv, D] in the KV pool, then attend
        causally. The last two dimensions of the three are contiguous. Without k and v the layer attends to those that
        another layer stored in this step and before. `sinks` [Hq]: a score of each head that takes part in the softmax
        and has no value.

        T tokens in the order of the step: decode rows first, then the prefill segments one after the other.
        Returns [T, Hq * D].
        """
        ...
