"""The code of an earlier version, out of its archive in `e2e/previous/`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.compat.frames import from_json, to_json

_ROOT = Path(__file__).parents[3]
_TESTS = _ROOT / "tests"


def unpack(version: str, directory: Path) -> Path:
    """The version's root, in `directory`."""
    with tarfile.open(_ROOT / "e2e" / "previous" / f"{version}.tar.xz") as archive:
        # Python 3.11.2, which Debian 12 has, takes no filter.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(directory)
    return directory / version


def write_and_read(
    version: str, root: Path, written: Path, frames: Mapping[str, Mapping[str, bytes]]
) -> dict[str, dict[str, Any]]:
    """Has the version at `root` write its own frames into the directory `written` and read these, by family and name.
    Returns what it reads."""
    program = _TESTS / "runtime" / "compat" / f"v{version.replace('.', '_')}"
    path = os.pathsep.join((str(root / "runtime"), str(_TESTS)))
    done = subprocess.run(
        [sys.executable, str(program), str(written), "--read"],
        env=os.environ | {"PYTHONPATH": path},
        input=json.dumps(to_json(frames)),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    values = from_json(json.loads(done.stdout))
    assert isinstance(values, dict)
    return values
