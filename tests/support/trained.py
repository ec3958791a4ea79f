"""Checkpoints that are trained once, and again when their sources have changed."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path

CACHE = Path(os.environ.get("TRAINED_MODELS", Path(__file__).parents[2] / ".cache"))
"""Directory of the checkpoints; `make test-processors` has some of its own."""
_TOY = Path(__file__).parents[2] / "runtime" / "minisgl" / "toy"


def train_if_outdated(folders: Sequence[Path], patterns: Sequence[str], train: Callable[[], object]) -> None:
    """Call `train`, which writes the checkpoints in `folders`, unless all are newer than their sources: the modules of
    minisgl.toy by `patterns`, as in the Makefile. One process at a time does so."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / f"{folders[0].relative_to(CACHE).parts[0]}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        newest = max(source.stat().st_mtime for pattern in patterns for source in _TOY.glob(pattern))
        targets = [folder / "config.json" for folder in folders]
        if not all(target.exists() and target.stat().st_mtime >= newest for target in targets):
            train()
