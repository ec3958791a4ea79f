"""Known bugs, put back into our code one at a time: each must be caught by the test that its patch names.

A patch starts with the bug in words, a line `Test: FILE::NAME` and a line `Says: TEXT`. It is applied to a copy of the
tree; there the test must fail with that text, so that it is the bug that fails it and not, say, the patch. That
the test passes without the bug is shown where it runs with all others.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.forked_pytest import ForkedPytest

ROOT = Path(__file__).parents[2]
PATCHES = sorted(Path(__file__).parent.glob("*.patch"))
FAILED = 1
"""pytest's exit code when tests ran and failed; a mutant that cannot even be collected proves nothing."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of the tree, without a bug before and after each test."""
    folder = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("__pycache__", "mutants", ".hypothesis")
    for name in ("runtime", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.fixture(scope="module")
def pytests(tree: Path) -> Iterator[ForkedPytest]:
    pytests = ForkedPytest(tree)
    yield pytests
    pytests.close()


@pytest.fixture
def mutant(tree: Path, patch: Path) -> Iterator[None]:
    """The tree has the bug."""
    _apply(patch, tree)
    yield
    _apply(patch, tree, "--reverse")


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("mutant")
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_the_named_test_catches_the_bug(patch: Path, pytests: ForkedPytest) -> None:
    run = pytests.run([_header(patch, "Test")])
    assert run.code == FAILED, f"the bug was not caught:\n{run.output[-4000:]}"
    # Of an error's own lines only: pytest shows the source around it too, which has the text in any case.
    errors = "\n".join(re.findall(r"^E .*$", run.output, re.MULTILINE))
    assert _header(patch, "Says") in errors, f"something else than the bug was caught:\n{run.output[-4000:]}"


def _header(patch: Path, name: str) -> str:
    [value] = re.findall(rf"^{name}: (.+)$", patch.read_text(), re.MULTILINE)
    return str(value)


def _apply(patch: Path, tree: Path, *options: str) -> None:
    applied = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", *options, str(patch)],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    assert applied.returncode == 0, f"{patch.name} does not apply any more, renew it: {applied.stderr}"
