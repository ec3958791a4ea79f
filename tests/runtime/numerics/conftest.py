"""Checkpoints and their references, made when a test first needs them; reports the largest difference at the end."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from minisgl.toy.tiny import write_tiny_checkpoint
from support.numerics.reference import TOLERANCE, Reference


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of an architecture's checkpoint."""
    torch.set_num_threads(1)
    return cache(lambda arch: write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / arch, arch))


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str], Reference]:
    return cache(lambda arch: Reference(checkpoint(arch)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    worst: dict[str, float] = {}
    for report in [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]:
        for name, value in report.user_properties:
            if name.startswith("worst logit difference"):
                worst[name] = max(worst.get(name, 0.0), float(str(value)))
    for name, value in worst.items():
        terminalreporter.write_line(f"{name}: {value:.1e} (at most {TOLERANCE:.0e} is allowed)")
