"""Cache of compiled kernels: first the folder of kernels compiled ahead of time, then Triton's own cache.

The name of a kernel in either is a hash of its source, its arguments' types and of Triton itself, so a kernel of
other code or for another GPU is never used.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

from triton.runtime.cache import FileCacheManager

from minisgl.kernels.compile.flashinfer_setup import KERNELS_DIR

SUBFOLDER: Final = "triton"
"""Subfolder for Triton in the folder of kernels compiled ahead of time."""


def use_built_kernels() -> None:
    """Install the cache. Call it once, before the first kernel is launched."""
    if os.environ.get(KERNELS_DIR):
        os.environ.setdefault("TRITON_CACHE_MANAGER", f"{__name__}:{BuiltFirst.__name__}")


class BuiltFirst(FileCacheManager):  # type: ignore[misc]
    """Triton's cache manager for the files of one kernel."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override, dump)
        built = Path(os.environ.get(KERNELS_DIR, "")) / SUBFOLDER / key
        if not (override or dump) and built.is_dir():
            # The folder is complete, so nothing is written there.
            self.cache_dir = str(built)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Paths of the files. The base class returns those at which they were written, but the folder may have
        moved."""
        group = self.get_file(f"__grp__{filename}")
        if group is None:
            return None
        names = json.loads(Path(group).read_text())["child_paths"]
        return {name: found for name in names if (found := self.get_file(name)) is not None}
