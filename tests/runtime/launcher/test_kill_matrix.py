"""Each process of a loaded server is killed once; `python -m support.launcher.kill_matrix` does it many times."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from support.launcher.kill_matrix import run, run_queued

# Several starts of several processes each, on a machine that may be busy with others.
pytestmark = pytest.mark.timeout(600)
SLACK = 3
"""The same machine is why."""


@pytest.mark.parametrize("victims", [("rank0", "tokenizer0", "frontend"), ("rank1",), ("launcher",)], ids="+".join)
def test_no_answer_is_truncated_and_the_server_comes_back(victims: tuple[str, ...]) -> None:
    # Not pytest's own directory, whose name leaves no room for a socket's.
    with tempfile.TemporaryDirectory(prefix="killed-") as folder:
        rounds = run(victims, 1, Path(folder))
        assert list(Path(folder).glob("minisgl-*")) == []
    assert [round.victim for round in rounds] == list(victims)
    assert [round.faults + round.late(SLACK) for round in rounds] == [[]] * len(victims)


def test_queued_and_running_requests_outlive_the_death_of_a_rank() -> None:
    with tempfile.TemporaryDirectory(prefix="killed-") as folder:
        rounds = run_queued(("rank0", "rank1"), 1, Path(folder))
    assert [round.faults for round in rounds] == [[]] * 2
