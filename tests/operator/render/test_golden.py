"""Golden manifests of each example; support/cluster/golden_manifests.py explains the files."""

from __future__ import annotations

import pytest

from support.cluster.example_models import EXAMPLES
from support.cluster.golden_manifests import BASE_FILE, COMMAND, FOLDER, golden, path_of


@pytest.mark.parametrize("name", EXAMPLES)
def test_manifests_equal_the_golden_files(name: str) -> None:
    path = path_of(name)
    reviewed = path.read_text() if path.exists() else None
    assert golden(name, BASE_FILE.read_text()) == reviewed, f"after a change on purpose, run `{COMMAND}` and review"


def test_there_is_no_golden_file_without_an_example() -> None:
    assert set(FOLDER.iterdir()) == {path_of(name) for name in EXAMPLES}, f"run `{COMMAND}`"
