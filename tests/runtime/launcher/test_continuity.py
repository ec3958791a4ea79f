"""Ranks are killed under answers of all kinds; `python -m support.launcher.continuity` does it many times."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from support import continuity_results
from support.continuity_results import of_all, record
from support.launcher.continuity import run

# Several starts of several processes each, on a machine that may be busy with others.
pytestmark = pytest.mark.timeout(600)


def test_answers_of_all_kinds_go_on_with_the_same_tokens() -> None:
    # Not pytest's own directory, whose name leaves no room for a socket's.
    with tempfile.TemporaryDirectory(prefix="killed-") as folder:
        figures, faults = run(2, 2, Path(folder), seeds=1)
    assert faults == []
    assert figures.kills == 2 and figures.continued >= 2 * 6


def kills(killed: str, replicas: int, gap: float, **more: int) -> dict[str, Any]:
    """Figures of a scenario."""
    figures = {"kills": 10, "failed": 0, "changed_tokens": 0, "gap_p50_s": gap, "gap_p99_s": 2 * gap}
    return {"killed": killed, "replicas": replicas, **figures, **more}


def test_figures_of_all_scenarios_add_up_and_name_the_longest_pauses() -> None:
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


def test_a_scenario_replaces_its_own_figures_and_those_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "continuity.json"
    monkeypatch.setattr(continuity_results, "RESULTS", results)
    record("ranks", kills("ranks", 1, 0.5, failed=1))
    found = json.loads(results.read_text())
    assert found.keys() == {"kills", "failed", "changed_tokens", "gap_p50_s", "gap_p99_s", "scenarios"}
    other = kills("pods", 2, 0.2, changed_tokens=2)
    record("pods of two replicas", other)
    again = kills("ranks", 1, 0.7, kills=30)
    record("ranks", again)
    assert json.loads(results.read_text()) == {
        **{"kills": 40, "failed": 0, "changed_tokens": 2},
        **{"gap_p50_s": 0.7, "gap_p99_s": 1.4, "gap_other_p50_s": 0.2, "gap_other_p99_s": 0.4},
        "scenarios": {"ranks": again, "pods of two replicas": other},
    }


def test_the_recorded_figures_of_all_scenarios_are_those_of_its_scenarios() -> None:
    found = json.loads(continuity_results.RESULTS.read_text())
    scenarios = found.pop("scenarios")
    assert found == of_all(scenarios)
    assert {"kills", "failed", "changed_tokens"} < found.keys()
    assert {"gap_p50_s", "gap_p99_s", "gap_other_p50_s", "gap_other_p99_s"} < found.keys()
