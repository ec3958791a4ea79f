"""The demo checkpoint that `make run` serves."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from support.trained import CACHE, train_if_outdated


@cache
def demo_checkpoint() -> Path:
    folder = CACHE / "demo"

    def train() -> None:
        from minisgl.toy.demo import write_demo_checkpoint

        write_demo_checkpoint(folder)

    train_if_outdated([folder], ("demo*", "tiny_tokenizer.py", "training.py"), train)
    return folder
