"""Small file systems on the nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.places import nodes, run


@contextmanager
def small_disk(directory: Path, size: str) -> Iterator[None]:
    """Mount a small file system on each node, writable for all users."""
    for node in nodes():
        run(node, "mkdir", "-p", directory)
        run(node, "mount", "-t", "tmpfs", "-o", f"size={size},mode=777", "small", directory)
    try:
        yield
    finally:
        for node in nodes():
            run(node, "umount", "--lazy", directory)
