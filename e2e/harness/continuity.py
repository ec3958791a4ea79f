"""Scenarios in which requests of all kinds go on while something happens, and the file with their results."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from harness.mixed_load import KINDS, mixed_load

Measurement = Callable[[str], None]
RESULTS: Final = Path(__file__).parents[2] / "benchmarks/results/continuity.json"


@contextmanager
def loaded(
    scenario: str,
    url: str,
    measurement: Measurement,
    *,
    kinds: Sequence[str] = tuple(KINDS),
    refusals_allowed: bool = False,
) -> Iterator[None]:
    """Requests of these kinds while the block runs, each of which gets the whole answer of an idle model."""
    with mixed_load(url, kinds=kinds, refusals_allowed=refusals_allowed) as load:
        began = time.monotonic()
        yield
        seconds = time.monotonic() - began
    measurement(f"{scenario} ({seconds:.0f} s): {load.summary()}")
    write_result(scenario, load.result(seconds))
    assert not load.failed, load.summary()
    assert not load.changed, load.summary()


def write_result(scenario: str, result: dict[str, Any]) -> None:
    """Replace the scenario's object."""
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found.setdefault("scenarios", {})[scenario] = result
    RESULTS.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
