"""Scenarios in which requests of all kinds go on while something happens."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from harness.mixed_load import KINDS, mixed_load
from support.continuity_results import record

Measurement = Callable[[str], None]


def keep(scenario: str, figures: Mapping[str, Any]) -> None:
    """Record figures, unless other processes run scenarios beside this one: they take CPU time from it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        record(scenario, figures)


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
    keep(scenario, load.result(seconds))
    assert not load.failed, load.summary()
    assert not load.changed, load.summary()
