"""Sizes of attention over packed sequences."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackedShape:
    """Attention of one layer. Head counts are per rank."""

    query_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    """Factor of scores."""
    causal: bool
    """Tokens attend to no later ones."""
    window: int | None = None
    """Last positions that a token attends to, its own included, and unless `causal` as many of the next ones; None: all
    of the sequence."""
    softcap: float | None = None
    """c of c · tanh(score / c)."""
    sinks: bool = False
    """Heads have sinks, see `interface.Attention`."""
