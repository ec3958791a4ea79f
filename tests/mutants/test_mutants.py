"""Known bugs, put back into our code one at a time: each must be caught by the test that its patch names.

A patch starts with the bug in words, a line `Test: FILE::NAME` and a line `Says: TEXT`. It is applied to a copy of the
tree; there the test must fail with that text, so that it is the bug that fails it and not, say, the patch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = sorted(Path(__file__).parent.glob("*.patch"))
FAILED = 1
"""pytest's exit code when tests ran and failed; a mutant that cannot even be collected proves nothing."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_the_named_test_catches_the_bug(patch: Path, tmp_path: Path) -> None:
    named, says = _header(patch, "Test"), _header(patch, "Says")
    _copy_of_the_tree(tmp_path)
    applied = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", str(patch)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert applied.returncode == 0, f"{patch.name} does not apply any more, renew it: {applied.stderr}"
    run = _pytest(tmp_path, [named])
    assert run.returncode == FAILED, f"the bug was not caught:\n{run.stdout[-3000:]}{run.stderr[-1000:]}"
    # Of an error's own lines only: pytest shows the source around it too, which has the text in any case.
    errors = "\n".join(re.findall(r"^E .*$", run.stdout, re.MULTILINE))
    assert says in errors, f"something else than the bug was caught:\n{run.stdout[-3000:]}"


@pytest.mark.timeout(600)
def test_without_a_bug_the_named_tests_pass(tmp_path: Path) -> None:
    _copy_of_the_tree(tmp_path)
    run = _pytest(tmp_path, sorted({_header(patch, "Test") for patch in PATCHES}))
    assert run.returncode == 0, f"the tests fail by themselves:\n{run.stdout[-3000:]}{run.stderr[-1000:]}"


def _header(patch: Path, name: str) -> str:
    [value] = re.findall(rf"^{name}: (.+)$", patch.read_text(), re.MULTILINE)
    return str(value)


def _copy_of_the_tree(folder: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__", "mutants", ".hypothesis")
    for name in ("runtime", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)


def _pytest(folder: Path, named: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-cov"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "COV"))}
    environment["PYTHONPATH"] = f"{folder}/runtime:{folder}/tests"
    return subprocess.run(
        [*command, *named],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
