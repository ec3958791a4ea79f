"""Known bugs, put back into our code one at a time: each must be caught by the test that its patch names.

A patch starts with the bug in words and a line `Test: FILE::NAME`. It is applied to a copy of the tree.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = sorted(Path(__file__).parent.glob("*.patch"))
FAILED = 1
"""pytest's exit code when tests ran and failed; a mutant that cannot even be collected proves nothing."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_the_named_test_catches_the_bug(patch: Path, tmp_path: Path) -> None:
    named = re.findall(r"^Test: (\S+)$", patch.read_text(), re.MULTILINE)
    assert named, f"{patch.name} names no test"
    ignore = shutil.ignore_patterns("__pycache__", "mutants", ".hypothesis")
    for folder in ("runtime", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    applied = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", str(patch)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert applied.returncode == 0, f"{patch.name} does not apply any more, renew it: {applied.stderr}"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-cov"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "COV"))}
    environment["PYTHONPATH"] = f"{tmp_path}/runtime:{tmp_path}/tests"
    run = subprocess.run(
        [*command, *named],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == FAILED, f"the bug was not caught:\n{run.stdout[-3000:]}{run.stderr[-1000:]}"
