"""Kinds of norms, as in a config file."""

from __future__ import annotations

import msgspec


class NormConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Kind of all RMS norms of a model."""

    eps: float
    unit_offset: bool = False
    """The gain is 1 + weight (Gemma). Folding the 1 into a 16-bit weight would lose up to 0.4 % of a gain."""
    round_last: bool = False
    """The gain is applied in float32 and its result is rounded. Else the normalized numbers are rounded first."""

    @property
    def is_plain(self) -> bool:
        """Kernels that also do something else have this kind."""
        return not self.unit_offset and not self.round_last
