"""The file with what became of requests in each scenario, which continue while a model changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).parents[2] / "benchmarks/results/continuity.json"


def write_result(scenario: str, result: dict[str, Any]) -> None:
    """Replace the scenario's object."""
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found.setdefault("scenarios", {})[scenario] = result
    RESULTS.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
