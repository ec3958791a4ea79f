"""Settings that all tests share."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from minisgl import logging as log
from support import line_coverage

if TYPE_CHECKING:
    from support.numerics.rank_pairs import SecondRank

_TESTS = Path(__file__).parent

line_coverage.start_if_wanted()

# How fast examples are made or run says how busy the machine is, and nothing about the code. With CI=true hypothesis
# has a profile of its own for that.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
if "CI" not in os.environ:
    settings.load_profile("busy")

# A shell starts a job in the background with SIGINT ignored, nohup one with SIGHUP ignored, and every program started
# from there ignores it as well. Tests send both; what has a handler here has its default in the programs they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)

# Those that take longest, the longest first: a worker takes one file after the other, and none of these may be what is
# left at the end while the others have nothing to do.
_LONGEST_FILES = (
    "runtime/replica/test_engine_pods.py",
    "operator/cluster/test_restarts.py",
    "operator/cluster/test_operator.py",
    "operator/cluster/test_outages.py",
    "operator/cluster/test_bench.py",
    "runtime/engine/test_warm_up.py",
    "runtime/parsing/test_streams.py",
    "runtime/launcher/test_hangs.py",
    "runtime/frontend/test_openapi.py",
    "runtime/toy/test_agent.py",
    "runtime/frontend/test_constrained_answers.py",
    "runtime/launcher/test_kill_matrix.py",
    "runtime/replica/test_early_drain_end.py",
    "runtime/numerics/test_families.py",
    "runtime/parsing/test_broken_answers.py",
    "runtime/launcher/test_continuity.py",
    "runtime/numerics/test_one_rank.py",
    "runtime/launcher/test_serve.py",
    "runtime/replica/test_hanging_ranks.py",
    "runtime/kernels/test_fp8_batch.py",
    "runtime/kernels/test_int4_linear.py",
    "runtime/kernels/test_fp8_linear.py",
    "runtime/numerics/test_two_ranks.py",
)


def pytest_sessionfinish() -> None:
    line_coverage.write()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {_TESTS / name: place for place, name in enumerate(_LONGEST_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    # Else the garbage collector looks at each of ten thousand tests and of all libraries again and again.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module")
def second_rank() -> Iterator[SecondRank]:
    """The process of rank 1, for one engine of two ranks after the other."""
    from support.numerics.rank_pairs import SecondRank

    rank = SecondRank()
    yield rank
    rank.close()


@pytest.fixture(autouse=True)
def _own_log_handlers_end_with_the_test() -> Iterator[None]:
    """A program that a test runs in this process sends the root logger's records to the test's own stderr."""
    root = logging.getLogger()
    level = root.level
    yield
    root.handlers[:] = [handler for handler in root.handlers if type(handler).__module__ != log.__name__]
    root.setLevel(level)
