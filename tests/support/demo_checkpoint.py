"""The demo checkpoint that `make run` serves: trained once, and again when its sources have changed."""

from __future__ import annotations

import fcntl
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_TOY = _ROOT / "runtime" / "minisgl" / "toy"


@cache
def demo_checkpoint() -> Path:
    folder = _ROOT / ".cache" / "demo"
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / "demo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_fresh(folder / "config.json"):
            from minisgl.toy.demo import write_demo_checkpoint

            write_demo_checkpoint(folder)
    return folder


def _is_fresh(target: Path) -> bool:
    """Compare modification times with the same sources as the Makefile."""
    sources = [*_TOY.glob("demo*"), _TOY / "tiny_tokenizer.py", _TOY / "training.py"]
    return target.exists() and target.stat().st_mtime >= max(source.stat().st_mtime for source in sources)
