"""Layers that stand for a whole model where only its kernels matter."""

from __future__ import annotations

from minisgl.models.config import ModelConfig


def representative_layers(config: ModelConfig) -> list[int]:
    """The layers that launch all kernels of a model: the first, which has no layer before it, one of each other kind,
    and the last, which computes only the rows that sample."""
    kinds = config.layers
    return sorted({0, *(kinds.index(kind) for kind in {*kinds}), config.num_layers - 1})
