"""Ranks are killed under answers of all kinds; `python -m support.launcher.continuity` does it many times."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from support.continuity_results import of_all
from support.launcher.continuity import run

# Several starts of several processes each, on a machine that may be busy with others.
pytestmark = pytest.mark.timeout(600)


def test_answers_of_all_kinds_go_on_with_the_same_tokens() -> None:
    # Not pytest's own directory, whose name leaves no room for a socket's.
    with tempfile.TemporaryDirectory(prefix="killed-") as folder:
        figures, faults = run(2, 2, Path(folder))
    assert faults == []
    assert figures.kills == 2 and figures.continued >= 2 * 6


def test_figures_of_all_scenarios_add_up_and_name_the_longest_pauses() -> None:
    def kills(killed: str, replicas: int, gap: float, **more: int) -> dict[str, object]:
        figures = {"kills": 10, "failed": 0, "changed_tokens": 0, "gap_p50_s": gap, "gap_p99_s": 2 * gap}
        return {"killed": killed, "replicas": replicas, **figures, **more}

    found = of_all(
        {
            "ranks": kills("ranks", 1, 0.5, failed=1),
            "more ranks": kills("ranks", 1, 0.7),
            "pods": kills("pods", 1, 4.0),
            "pods of two replicas": kills("pods", 2, 0.2, changed_tokens=2),
            "kubectl drain": {"requests": 9, "failed": 3, "changed_tokens": 0},
        }
    )
    assert found == {
        **{"kills": 40, "failed": 4, "changed_tokens": 2},
        **{"gap_p50_s": 0.7, "gap_p99_s": 1.4, "gap_other_p50_s": 0.2, "gap_other_p99_s": 0.4},
    }
