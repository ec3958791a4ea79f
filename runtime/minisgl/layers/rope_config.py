"""Parameters of a rotary embedding, as in a config file."""

from __future__ import annotations

from typing import Literal

import msgspec


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding (Su et al., arXiv:2104.09864) with one of the known context extensions."""

    kind: Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"] = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    """Context length of pre-training; only llama3, yarn and longrope."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """yarn, longrope: scale of cos and sin, which sharpens attention over longer contexts (arXiv:2309.00071, 3.4)."""
    truncate: bool = True
    """yarn: round the bounds of the blended dimensions to whole dimensions."""
    short_factors: tuple[float, ...] = ()
    """longrope (arXiv:2402.13753): factor of each wavelength where no sequence exceeds the length of pre-training."""
    long_factors: tuple[float, ...] = ()
    """The same for longer sequences."""
    rotated_share: float = 1.0
    """Share of a head's dimensions that are rotated, the first ones; the others carry no position. proportional: share
    of the pairs (i, i + D / 2) of a whole head of D dimensions that turn, the first and fastest ones."""
    interleaved: bool = False
    """Pairs are neighbouring dimensions (2 i, 2 i + 1), and not those that are half of the rotated ones apart."""

    def rotated_dims(self, head_dim: int) -> int:
        """Number of dimensions of a head that are rotated, some of them by angles of 0."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.rotated_share)

    def order(self, head_dim: int) -> tuple[int, ...] | None:
        """Dimensions of a head in the order in which pairs are (i, i + head_dim / 2), those of pairs that are not
        rotated behind the others; None: they are in this order. Rows of the weights that make queries and keys are
        loaded in it, so that one kernel serves all kinds."""
        rotated, half = self.rotated_dims(head_dim), head_dim // 2
        if rotated == head_dim and not self.interleaved:
            return None
        dims = range(rotated)
        first, second = (dims[0::2], dims[1::2]) if self.interleaved else (dims[: rotated // 2], dims[rotated // 2 :])
        middle = rotated + half - rotated // 2
        return (*first, *range(rotated, middle), *second, *range(middle, head_dim))
