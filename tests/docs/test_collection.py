"""No test is left out by where it stands."""

from __future__ import annotations

import fnmatch
from pathlib import Path

import pytest


def test_pytest_looks_into_every_folder(pytestconfig: pytest.Config) -> None:
    folders = {path.parent.name for path in Path(pytestconfig.rootpath, "tests").rglob("test_*.py")}
    skipped = pytestconfig.getini("norecursedirs")
    assert {name for name in folders for pattern in skipped if fnmatch.fnmatch(name, pattern)} == set()
