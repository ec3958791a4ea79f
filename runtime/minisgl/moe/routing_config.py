"""Selection of experts, as in a config file."""

from __future__ import annotations

from typing import Literal

import msgspec


class RoutingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Selection of each token's experts by the scores of its router, and the weights of their outputs."""

    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Function of the router's logits, in float32."""
    selection_bias: bool = False
    """The checkpoint has a number for each expert that is added to its score for the selection alone, not in the weight
    (DeepSeek-V3, arXiv:2412.19437)."""
    renormalize: bool = False
    """Divide the weights of a token's experts by their sum."""
    smallest_sum: float = 0.0
    """Smallest divisor of `renormalize`."""
    scale: float = 1.0
    """Factor of the weights behind that."""
    float32_router: bool = False
    """The router's product is in float32, and its weight is kept so."""

    @property
    def is_plain(self) -> bool:
        """Kernels that also do something else have this kind."""
        return self == RoutingConfig(renormalize=self.renormalize)
