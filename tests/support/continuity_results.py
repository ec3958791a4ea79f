"""The file with the figures of answers that go on: an object for each scenario, and the figures of all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).parents[2] / "benchmarks" / "results" / "continuity.json"
_SLACK: Final = 3
"""For machines that are busy with others; the results have the true figures."""


def check_pauses(figures: Mapping[str, Any]) -> None:
    """Assert that pauses at kills are not far longer than docs/failures.md promises."""
    if figures["replicas"] > 1:
        promised = {"p50": 0.5, "p99": 1.0}
    elif figures["killed"] == "ranks":
        promised = {"p50": 2.0, "p99": 5.0}
    else:
        promised = {"p99": 20.0}
    for percentile, seconds in promised.items():
        assert figures[f"gap_{percentile}_s"] <= _SLACK * seconds, figures


def record(scenario: str, figures: Mapping[str, Any]) -> None:
    """Replace the scenario's object, and the figures of all scenarios."""
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    scenarios = found.get("scenarios", {}) | {scenario: dict(figures)}
    RESULTS.write_text(json.dumps({**of_all(scenarios), "scenarios": scenarios}, indent=2, sort_keys=True) + "\n")


def of_all(scenarios: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Sums of kills, failed requests and changed answers. `gap_p50_s` and `gap_p99_s`: the largest of the scenarios in
    which only ranks are killed and there is one replica; `gap_other_p50_s` and `gap_other_p99_s`: of those in which
    another replica serves. Scenarios with kills name what is killed (`killed`) and the number of `replicas`."""
    figures: dict[str, Any] = {
        name: sum(each.get(name, 0) for each in scenarios.values()) for name in ("kills", "failed", "changed_tokens")
    }
    ranks = [each for each in scenarios.values() if (each.get("killed"), each.get("replicas")) == ("ranks", 1)]
    others = [each for each in scenarios.values() if each.get("replicas", 1) > 1]
    for prefix, chosen in (("gap", ranks), ("gap_other", others)):
        for percentile in ("p50_s", "p99_s"):
            if chosen:
                figures[f"{prefix}_{percentile}"] = max(each[f"gap_{percentile}"] for each in chosen)
    return figures
