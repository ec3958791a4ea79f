"""A tiny checkpoint as wide as kernels of few rows want it, with heads of 128."""

from __future__ import annotations

from pathlib import Path

from minisgl.models.tiny import write_tiny_checkpoint


def write_wide_checkpoint(folder: Path, arch: str) -> Path:
    return write_tiny_checkpoint(
        folder, arch, hidden=1024, intermediate=1024, heads=8, kv_heads=4, head_dim=128, expert_intermediate=128
    )
