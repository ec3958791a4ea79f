"""A replica of two pods with a rank that hangs: the epoch ends, and the next one serves."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.frontend.scheduler_client import SchedulerClient
from support.launcher.engine_pods import Pods
from support.launcher.hanging_ranks import DIRECTORY
from support.tiny_checkpoint import tiny_checkpoint

# Several starts of several processes each, on a machine that may be busy with others.
pytestmark = pytest.mark.timeout(600)

_PROMPT = [7, 8, 9, 10, 11, 12]


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    return tmp_path


@pytest.fixture
def pods(hangs: Path) -> Iterator[Pods]:
    with tempfile.TemporaryDirectory(prefix="pods-") as folder:
        flags = ("--tp", "2", "--ranks-per-pod", "1", "--stall-timeout", "6", "--revision-label", "a")
        pods = Pods(Path(folder), tiny_checkpoint(), *flags, program="support.launcher.hanging_ranks")
        for _ in range(2):
            pods.add()
        yield pods
        pods.close()


def test_a_hang_ends_the_epoch_and_names_the_rank(pods: Pods, hangs: Path) -> None:
    leader, member = pods.all
    boot = leader.wait_for(phase="Ready")["epoch"][0]

    # Rank 1 waits for nothing, so only rank 0 hangs.
    (hangs / "desert-1").touch()
    client = SchedulerClient(pods.scheduler)
    client.submit(_PROMPT, 8)
    status = leader.wait_for(phase="Ready", epoch=[boot, 2])
    client.close()
    failure = status["last_failure"]
    assert (failure["rank"], failure["pod"], failure["exit_code"], failure["reason"]) == (0, "m-r0-0", None, "Error")
    assert "a step has not finished for" in failure["message"]

    # A stopped rank of the other pod, without any request.
    os.kill(member.children()["rank1"], signal.SIGSTOP)
    status = leader.wait_for(phase="Ready", epoch=[boot, 3])
    failure = status["last_failure"]
    assert (failure["rank"], failure["pod"], failure["exit_code"], failure["reason"]) == (1, "m-r0-1", None, "Error")
    assert "it has sent no heartbeat for" in failure["message"]
    assert status["restarts"] == 2

    client = SchedulerClient(pods.scheduler)
    assert len(client.generate(_PROMPT, 8)) == 8
    client.close()
