"""Tiny checkpoints of shapes for which the kernels of real models are chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minisgl.toy.tiny import write_tiny_checkpoint


def write_wide_checkpoint(folder: Path, arch: str, **options: Any) -> Path:
    """As wide as kernels of few rows want it. `options`: further ones of `write_tiny_checkpoint`."""
    sizes = {"hidden": 1024, "intermediate": 1024, "heads": 8, "kv_heads": 4, "head_dim": 128}
    return write_tiny_checkpoint(folder, arch, **{**sizes, "expert_intermediate": 128, **options})


def write_layers_of_14b(folder: Path) -> Path:
    """Two layers of the shape of Qwen3-14B's."""
    return write_tiny_checkpoint(
        folder, "qwen3", hidden=5120, intermediate=17408, heads=40, kv_heads=8, head_dim=128, tied=False
    )
