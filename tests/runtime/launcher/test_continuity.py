"""Ranks are killed under answers of all kinds; `python -m support.launcher.continuity` does it many times."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from support.launcher.continuity import run

# Several starts of several processes each, on a machine that may be busy with others.
pytestmark = pytest.mark.timeout(600)


def test_answers_of_all_kinds_go_on_with_the_same_tokens() -> None:
    # Not pytest's own directory, whose name leaves no room for a socket's.
    with tempfile.TemporaryDirectory(prefix="killed-") as folder:
        figures, faults = run(2, 2, Path(folder))
    assert faults == []
    assert figures.kills == 2 and figures.continued >= 2 * 6
