"""A replica of two pods on a tiny model, from outside: launchers, links, kills and drains."""

from __future__ import annotations

import hashlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.frontend.scheduler_client import SchedulerClient
from support.frontend.served import eventually
from support.launcher.engine_pods import Pods
from support.tiny_checkpoint import tiny_checkpoint

# Several starts of several processes each, on a machine that may be busy with others.
pytestmark = pytest.mark.timeout(600)

PROMPTS = ([7, 8, 9, 10, 11, 12], [100, 101, 102], [55] * 40)

Start = Callable[..., Pods]


@pytest.fixture
def replica() -> Iterator[Start]:
    started: list[Pods] = []
    # Not pytest's own directory, whose name leaves no room for a socket's.
    with tempfile.TemporaryDirectory(prefix="pods-") as folder:

        def start(count: int, *flags: str) -> Pods:
            path = Path(folder) / str(len(started))
            path.mkdir()
            pods = Pods(path, tiny_checkpoint(), *flags, "--revision-label", "a")
            started.append(pods)
            for _ in range(count):
                pods.add()
            return pods

        yield start
        for pods in started:
            pods.close()


def _answers(pods: Pods) -> list[list[int]]:
    client = SchedulerClient(pods.scheduler)
    answers = [client.generate(prompt, 12) for prompt in PROMPTS]
    client.close()
    return answers


def _running(pods: Pods, tokens: int) -> tuple[SchedulerClient, bytes]:
    """A request that has begun to be answered."""
    client = SchedulerClient(pods.scheduler)
    running = client.submit(PROMPTS[0], tokens)
    client.read_until(lambda: len(client.tokens[running]) > 3)
    return client, running


@contextmanager
def _held(standby: int) -> Iterator[None]:
    """It takes over within half a second, which is soon over for somebody who looks now and then."""
    os.kill(standby, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(standby, signal.SIGCONT)


def test_two_pods_live_through_the_death_of_anything(replica: Start, capsys: pytest.CaptureFixture[str]) -> None:
    alone = replica(1, "--tp", "1", "--served-model-name", "tiny")
    pods = replica(2, "--tp", "2", "--ranks-per-pod", "1", "--served-model-name", "tiny")
    leader, follower = pods.all

    alone.all[0].wait_for(phase="Ready")
    expected = _answers(alone)
    alone.all[0].popen.send_signal(signal.SIGTERM)

    status = leader.wait_for(phase="Ready")
    assert status["transport"] == "gloo"
    assert [(rank["rank"], rank["pod"], rank["node"], rank["phase"]) for rank in status["ranks"]] == [
        (0, "m-r0-0", "node-0", "Ready"),
        (1, "m-r0-1", "node-1", "Ready"),
    ]
    assert status["card"]["architecture"] == "Qwen3ForCausalLM"
    assert status["timings"]["total"] >= status["timings"]["start"] > 0
    assert status["last_failure"] is None
    assert follower.get("/ready")[0] == 200
    client = SchedulerClient(pods.scheduler)
    assert (client.welcome.replica, client.welcome.revision) == ("m-r0", "a")
    assert list(client.welcome.epoch) == status["epoch"]
    for name, sha256 in client.welcome.model.tokenizer_hashes.items():
        code, content = leader.get(f"/files/{name}")
        assert (code, hashlib.sha256(content).hexdigest()) == (200, sha256)
    assert leader.get("/files/config.json")[0] == 404
    assert leader.get("/files/..%2f..%2fetc%2fpasswd")[0] == 404
    assert follower.get("/files/tokenizer.json")[0] == 404
    client.close()
    assert _answers(pods) == expected
    assert alone.all[0].popen.wait(60) == 0

    for number, (pod, rank) in enumerate([(leader, 0), (follower, 1)], 1):
        for each in pods.all:
            each.wait_for(standbys=1)
        with _held(pod.children()[f"standby-rank{rank}"]):
            killed = pod.kill_rank(rank)
            eventually(lambda: leader.get("/ready")[0] == 503)
        status = leader.wait_for(phase="Ready", epoch=[status["epoch"][0], status["epoch"][1] + 1])
        seconds = time.monotonic() - killed
        failure = status["last_failure"]
        assert (failure["rank"], failure["pod"], failure["exit_code"], failure["reason"]) == (
            *(rank, pod.name, -9, "Killed"),
        )
        assert f"rank{rank} (pid" in failure["message"]
        assert status["restarts"] == number
        assert _answers(pods) == expected
        with capsys.disabled():
            print(f"\nrank {rank} killed, serves again after {seconds:.2f} s: {status['timings']}")
        # Ten seconds are what is promised; the machine that runs this may be busy with something else.
        assert seconds < 30

    follower.close()
    waiting = leader.wait_for(phase="Waiting")
    assert waiting["progress"] == "waiting for m-r0-1"
    assert leader.children().keys() <= {"standby-rank0"}
    follower.start()
    status = leader.wait_for(phase="Ready")
    assert status["last_failure"]["pod"] == "m-r0-1"
    assert status["last_failure"]["exit_code"] is None
    assert "the link to its pod m-r0-1 was lost" in status["last_failure"]["message"]
    assert status["restarts"] == 3
    assert _answers(pods) == expected


def test_drains_let_requests_finish_for_one_pod_and_for_all(replica: Start) -> None:
    pods = replica(2, "--tp", "2", "--ranks-per-pod", "1")
    leader, follower = pods.all
    leader.wait_for(phase="Ready")

    # One pod is about to be replaced: nothing is cut off for it, and the other launchers stay.
    client, running = _running(pods, 150)
    assert follower.get("/drain", "POST")[0] == 202
    client.read_until(lambda: running in client.finish)
    assert (client.finish[running], len(client.tokens[running])) == ("length", 150)
    client.close()
    assert follower.popen.wait(60) == 0
    leader.wait_for(phase="Waiting")
    follower.start()
    status = leader.wait_for(phase="Ready")
    assert (status["restarts"], status["last_failure"]) == (0, None)

    # Kubernetes ends all pods of a replica at the same time.
    client, running = _running(pods, 700)
    follower.popen.send_signal(signal.SIGTERM)
    leader.popen.send_signal(signal.SIGTERM)
    client.read_until(lambda: client.status is not None and client.status.draining)
    assert leader.wait_for(phase="Draining")["ready"] is False
    assert leader.get("/ready")[0] == 503
    assert follower.popen.poll() is None, "it waits until what is under way has been answered"
    late = client.submit(PROMPTS[1], 5)
    client.read_until(lambda: late in client.failed)
    assert client.failed[late].code == "draining"
    client.read_until(lambda: running in client.finish)
    assert (client.finish[running], len(client.tokens[running])) == ("length", 700)
    client.close()
    assert leader.popen.wait(60) == 0
    assert follower.popen.wait(60) == 0


def test_a_second_signal_ends_everything_at_once(replica: Start) -> None:
    pods = replica(1, "--tp", "1", "--drain-timeout", "600")
    leader = pods.all[0]
    leader.wait_for(phase="Ready")
    client, running = _running(pods, 1900)
    assert leader.get("/drain")[0] == 202
    leader.wait_for(phase="Draining")
    leader.popen.send_signal(signal.SIGTERM)
    client.read_until(lambda: len(client.tokens[running]) > 20)
    assert leader.popen.poll() is None, "the signal that follows /drain asks for the same"
    leader.popen.send_signal(signal.SIGTERM)
    assert leader.popen.wait(60) == 0
    client.close()
    assert leader.children() == {}
