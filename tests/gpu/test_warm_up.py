"""Starts of an engine with an empty cache of our own kernels, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minisgl.kernels.compile.flashinfer_setup import KERNELS_DIR
from minisgl.kernels.compile.triton_cache import SUBFOLDER


@pytest.fixture
def empty_cache(tmp_path: Path) -> dict[str, str]:
    """Environment with an empty cache, but with the libraries of flashinfer that are compiled ahead of time."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    if built := os.environ.get(KERNELS_DIR):
        libraries = tmp_path / "libraries"
        libraries.mkdir()
        for entry in Path(built).iterdir():
            if entry.name != SUBFOLDER:
                (libraries / entry.name).symlink_to(entry)
        environment[KERNELS_DIR] = str(libraries)
    return environment


def _random_steps(checkpoint: Path, environment: dict[str, str]) -> tuple[dict[str, Any], str]:
    """Statistics and log of an engine that runs random steps."""
    command = [sys.executable, "-m", "support.numerics.random_plans", str(checkpoint)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize("arch", ["qwen3-moe", "llama"])
def test_a_start_compiles_all_kernels_of_later_steps(
    arch: str, wide_checkpoint: Callable[[str], Path], empty_cache: dict[str, str]
) -> None:
    checkpoint = wide_checkpoint(arch)
    for cached in (False, True):
        stats, log = _random_steps(checkpoint, empty_cache)
        assert stats["steps"] == 60
        assert (stats["compiled_kernels"] == 0) == cached, "the second start finds what the first has compiled"
        assert stats["compiled_after_ready"] == 0
        assert "while serving" not in log
        assert "one after the other" not in log
