"""A replica of two pods with a tiny model: launchers, links, kills and drains."""

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

from minisgl.hub.model_revision import model_revision
from support.frontend.scheduler_client import SchedulerClient
from support.frontend.served import eventually, is_fork
from support.launcher.engine_pods import Pods
from support.tiny_checkpoint import tiny_checkpoint

# Several starts of several processes each, on a machine that may be busy with others.
pytestmark = pytest.mark.timeout(600)

PROMPTS = ([7, 8, 9, 10, 11, 12], [100, 101, 102], [55] * 40)

Start = Callable[..., Pods]


@pytest.fixture
def replica() -> Iterator[Start]:
    started: list[Pods] = []
    # Not pytest's own directory: its path is too long for a socket below it.
    with tempfile.TemporaryDirectory(prefix="pods-") as folder:

        def start(count: int, *flags: str, **options: str) -> Pods:
            path = Path(folder) / str(len(started))
            path.mkdir()
            pods = Pods(path, tiny_checkpoint(), *flags, "--revision-label", "a", **options)
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
    """Submit a request, and wait until it has output."""
    client = SchedulerClient(pods.scheduler)
    running = client.submit(PROMPTS[0], tokens)
    client.read_until(lambda: len(client.tokens[running]) > 3)
    return client, running


@contextmanager
def _held(standby: int) -> Iterator[None]:
    """Pause a standby, which otherwise forks before the test can see that the replica is not ready."""
    os.kill(standby, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(standby, signal.SIGCONT)


def test_two_pods_recover_from_the_death_of_each_rank_and_of_a_pod(
    replica: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = replica(1, "--tp", "1", "--served-model-name", "tiny")
    pods = replica(2, "--tp", "2", "--ranks-per-pod", "1", "--served-model-name", "tiny")
    leader, member = pods.all

    alone.all[0].wait_for(phase="Ready")
    expected = _answers(alone)
    alone.all[0].popen.send_signal(signal.SIGTERM)

    status = leader.wait_for(phase="Ready")
    assert status["transport"] == "gloo"
    assert status["attention"]["decode"] == "torch"
    assert status["data_types"] == {"weights": "float32", "kv_cache": "float32"}
    assert [(rank["rank"], rank["pod"], rank["node"], rank["phase"]) for rank in status["ranks"]] == [
        (0, "m-r0-0", "node-0", "Ready"),
        (1, "m-r0-1", "node-1", "Ready"),
    ]
    assert status["card"]["architecture"] == "Qwen3ForCausalLM"
    assert status["timings"]["total"] >= status["timings"]["start"] > 0
    assert status["last_failure"] is None
    assert member.get("/ready")[0] == 200
    client = SchedulerClient(pods.scheduler)
    assert (client.welcome.replica, client.welcome.revision) == ("m-r0", "a")
    assert client.welcome.model.revision == model_revision(tiny_checkpoint()) != ""
    assert list(client.welcome.epoch) == status["epoch"]
    for name, sha256 in client.welcome.model.tokenizer_hashes.items():
        code, content = leader.get(f"/files/{name}")
        assert (code, hashlib.sha256(content).hexdigest()) == (200, sha256)
    assert leader.get("/files/config.json")[0] == 404
    assert leader.get("/files/..%2f..%2fetc%2fpasswd")[0] == 404
    assert member.get("/files/tokenizer.json")[0] == 404
    client.close()
    assert _answers(pods) == expected
    assert alone.all[0].popen.wait(60) == 0

    for number, (pod, rank) in enumerate([(leader, 0), (member, 1)], 1):
        for each in pods.all:
            each.wait_for(standbys=1)
        with _held(pod.children()["standby-engine"]):
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
            print(f"\nrank {rank} killed, ready again after {seconds:.2f} s: {status['timings']}")
        # The promise is ten seconds; the machine that runs this test may be busy.
        assert seconds < 30

    member.kill()
    waiting = leader.wait_for(phase="Waiting")
    assert waiting["progress"] == "waiting for m-r0-1"
    assert leader.children().keys() <= {"standby-engine"}
    member.start()
    status = leader.wait_for(phase="Ready")
    assert status["last_failure"]["pod"] == "m-r0-1"
    assert status["last_failure"]["exit_code"] is None
    assert "the link to its pod m-r0-1 was lost" in status["last_failure"]["message"]
    assert status["restarts"] == 3
    assert _answers(pods) == expected


def test_pods_do_their_imports_while_they_wait_for_others(replica: Start) -> None:
    """Over IPv6, which differs in nothing else."""
    pods = replica(0, "--tp", "2", "--ranks-per-pod", "1", host="::1")
    member = pods.add(index=1)
    member.wait_for(phase="Waiting", standbys=1)
    imported = member.children()["standby-engine"]
    leader = pods.add(index=0)
    status = leader.wait_for(phase="Ready")
    assert is_fork(member.children()["rank1"], imported)
    assert status["transport"] == "gloo"
    timings = status["timings"]
    assert timings["start"] > timings["load"], "imports count as the start, also when they began before"
    assert len(_answers(pods)) == len(PROMPTS)

    member.kill()
    leader.kill()
    leader.start()
    leader.wait_for(phase="Waiting", standbys=1)
    imported = leader.children()["standby-engine"]
    member.start()
    leader.wait_for(phase="Ready")
    assert is_fork(leader.children()["rank0"], imported)
    assert len(_answers(pods)) == len(PROMPTS)


def test_a_drain_of_one_pod_or_of_all_lets_requests_finish(replica: Start) -> None:
    pods = replica(2, "--tp", "2", "--ranks-per-pod", "1")
    leader, member = pods.all
    leader.wait_for(phase="Ready")

    # One pod is about to be replaced: running requests finish, and the other launchers stay.
    client, running = _running(pods, 150)
    assert member.get("/drain", "POST")[0] == 202
    client.read_until(lambda: running in client.finish)
    assert (client.finish[running], len(client.tokens[running])) == ("length", 150)
    client.close()
    assert member.popen.wait(60) == 0
    leader.wait_for(phase="Waiting")
    member.start()
    status = leader.wait_for(phase="Ready")
    assert (status["restarts"], status["last_failure"]) == (0, None)

    # Pod 0 is about to be replaced: the other launchers wait for its successor. The kubelet would delay their restarts.
    leader.popen.send_signal(signal.SIGTERM)
    assert leader.popen.wait(60) == 0
    eventually(lambda: member.get("/ready")[0] == 503)
    leader.start()
    status = leader.wait_for(phase="Ready")
    assert (status["restarts"], status["last_failure"]) == (0, None)

    # Kubernetes stops all pods of a replica at the same time.
    client, running = _running(pods, 700)
    member.popen.send_signal(signal.SIGTERM)
    leader.popen.send_signal(signal.SIGTERM)
    client.read_until(lambda: client.status is not None and client.status.draining)
    assert leader.wait_for(phase="Draining")["ready"] is False
    assert leader.get("/ready")[0] == 503
    assert member.popen.poll() is None, "it waits until running requests have been answered"
    late = client.submit(PROMPTS[1], 5)
    client.read_until(lambda: late in client.failed)
    assert client.failed[late].code == "draining"
    client.read_until(lambda: running in client.finish)
    assert (client.finish[running], len(client.tokens[running])) == ("length", 700)
    client.close()
    assert leader.popen.wait(60) == 0
    assert member.popen.wait(60) == 0


def test_a_second_signal_stops_the_drain(replica: Start) -> None:
    pods = replica(1, "--tp", "1", "--drain-timeout", "600")
    leader = pods.all[0]
    leader.wait_for(phase="Ready")
    client, running = _running(pods, 1900)
    assert leader.get("/drain")[0] == 202
    leader.wait_for(phase="Draining")
    leader.popen.send_signal(signal.SIGTERM)
    client.read_until(lambda: len(client.tokens[running]) > 20)
    assert leader.popen.poll() is None, "the first signal after /drain counts as the same request"
    leader.popen.send_signal(signal.SIGTERM)
    assert leader.popen.wait(60) == 0
    client.close()
    assert leader.children() == {}
