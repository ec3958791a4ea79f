"""Checkpoints of the agent model, one for each format."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from support.trained import CACHE, train_if_outdated


@cache
def agent_checkpoints() -> dict[str, Path]:
    """Return the directories by format."""
    from minisgl.toy.agent_formats import TEMPLATES

    folder = CACHE / "agent"
    folders = {name: folder / name for name in TEMPLATES}

    def train() -> None:
        from minisgl.toy.agent import write_agent_checkpoints

        write_agent_checkpoints(folder)

    train_if_outdated([*folders.values()], ("agent*", "tiny_tokenizer.py", "training.py", "muon.py"), train)
    return folders
