"""Parameters of a rotary embedding, as in a config file."""

from __future__ import annotations

from typing import Literal

import msgspec


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding (Su et al., arXiv:2104.09864) with one of the known context extensions."""

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    """Context length of pre-training; only llama3 and yarn."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """yarn: scale of cos and sin, which sharpens attention over the longer context (arXiv:2309.00071, 3.4)."""
    truncate: bool = True
    """yarn: round the bounds of the blended dimensions to whole dimensions."""
