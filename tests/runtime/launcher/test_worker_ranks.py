"""Worker ranks of a program that is rank 0 itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from minisgl.errors import LauncherError
from minisgl.launcher import worker_ranks
from minisgl.launcher.process import ProcessSpec

DIES = ProcessSpec(name="rank1", target="minisgl.launcher:nothing", config=None)

STUCK = """
import sys
import threading
from minisgl.launcher import worker_ranks
from minisgl.launcher.process import ProcessSpec

worker_ranks._STUCK_SECONDS = 0.0
running = worker_ranks.WorkerRanks([ProcessSpec(name="rank1", target="minisgl.launcher:nothing", config=None)])
print("an answer")
if "closed" in sys.argv:
    sys.stdout.close()
with running.waiting_for_ranks():
    threading.Event().wait()
"""


@pytest.mark.parametrize("stdout", ["open", "closed"])
def test_a_program_that_waits_on_its_device_for_a_dead_rank_exits(stdout: str) -> None:
    command = [sys.executable, "-c", STUCK, stdout]
    # Unbuffered output would hide that the program's own output is flushed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 1
    assert done.stdout == "an answer\n", "output of the program is lost"
    assert "process_died: rank1" in done.stderr and "rank 0 waits for it" in done.stderr


def test_a_program_that_does_not_wait_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_ranks, "_STUCK_SECONDS", 0.0)
    running = worker_ranks.WorkerRanks([DIES])
    with pytest.raises(LauncherError, match="rank1") as caught:
        running.check(60)
    assert caught.value.code == "process_died"
    running.close()


def test_a_wait_that_begins_long_after_the_exit_gets_its_full_time(monkeypatch: pytest.MonkeyPatch) -> None:
    running = worker_ranks.WorkerRanks([DIES])
    with pytest.raises(LauncherError):
        running.check(60)
    running._exited_at -= 2 * worker_ranks._STUCK_SECONDS
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with running.waiting_for_ranks():
        running._exit_if_stuck()
    assert not ended
    running.close()
