"""A tiny checkpoint that the tests of one worker process share."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path


@cache
def tiny_checkpoint(arch: str = "qwen3") -> Path:
    from minisgl.toy.tiny import write_tiny_checkpoint

    folder = Path(tempfile.mkdtemp(prefix=f"tiny-{arch}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_tiny_checkpoint(folder, arch)
    return folder
