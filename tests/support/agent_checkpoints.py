"""Checkpoints of the agent model, one for each format: trained once, and again when their sources have changed."""

from __future__ import annotations

import fcntl
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_TOY = _ROOT / "runtime" / "minisgl" / "toy"


@cache
def agent_checkpoints() -> dict[str, Path]:
    """Return the directories by format."""
    from minisgl.toy.agent_formats import TEMPLATES

    folder = _ROOT / ".cache" / "agent"
    folder.parent.mkdir(exist_ok=True)
    folders = {name: folder / name for name in TEMPLATES}
    with (folder.parent / "agent.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all(_is_fresh(one / "config.json") for one in folders.values()):
            from minisgl.toy.agent import write_agent_checkpoints

            write_agent_checkpoints(folder)
    return folders


def _is_fresh(target: Path) -> bool:
    """Compare modification times with the same sources as the Makefile."""
    sources = [*_TOY.glob("agent*"), _TOY / "training.py"]
    return target.exists() and target.stat().st_mtime >= max(source.stat().st_mtime for source in sources)
