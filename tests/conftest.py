"""Settings that all tests share."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from minisgl import logging as log

# How fast examples are made or run says how busy the machine is, and nothing about the code. With CI=true hypothesis
# has a profile of its own for that.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
if "CI" not in os.environ:
    settings.load_profile("busy")


@pytest.fixture(autouse=True)
def _own_log_handlers_end_with_the_test() -> Iterator[None]:
    """A program that a test runs in this process sends the root logger's records to the test's own stderr."""
    root = logging.getLogger()
    level = root.level
    yield
    root.handlers[:] = [handler for handler in root.handlers if type(handler).__module__ != log.__name__]
    root.setLevel(level)
