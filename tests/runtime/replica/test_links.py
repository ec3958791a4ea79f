"""Real launchers with a link to a fake peer: which pods they reject, and how they handle failures of the peer."""

from __future__ import annotations

import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from minisgl.replica.messages import (
    LINK_VERSION,
    Accepted,
    Drained,
    DrainRequested,
    FromLeader,
    GaveUp,
    Join,
    KillRanks,
    PodTopology,
    RankEnded,
    RankProgress,
    Rejected,
    StartRanks,
)
from support.frontend.served import eventually
from support.launcher.engine_pods import Pods
from support.launcher.link_peer import LinkPeer, accept_member, dial_leader
from support.tiny_checkpoint import tiny_checkpoint

Start = Callable[..., Pods]
_TOPOLOGY = PodTopology(node="node-1", devices=(), shm_device=1)
_TWO_PODS = ("--tp", "2", "--ranks-per-pod", "1", "--revision-label", "a")


@pytest.fixture
def replica() -> Iterator[Start]:
    started: list[Pods] = []
    with tempfile.TemporaryDirectory(prefix="links-") as folder:

        def make(*flags: str, model: Path | None = None) -> Pods:
            pods = Pods(Path(folder), model or tiny_checkpoint(), *_TWO_PODS, *flags)
            started.append(pods)
            return pods

        yield make
        for pods in started:
            pods.close()


def _join(**fields: Any) -> Join:
    join = Join(
        version=LINK_VERSION,
        replica="m-r0",
        revision="a",
        tensor_parallel=2,
        ranks_per_pod=1,
        pod_index=1,
        pod="m-r0-1",
        topology=_TOPOLOGY,
    )
    return msgspec.structs.replace(join, **fields)


def _joined(pods: Pods) -> LinkPeer[FromLeader]:
    peer = dial_leader(pods.ports["link"])
    peer.send(_join())
    peer.receive(Accepted)
    return peer


def _killed(begin: StartRanks, message: str = "rank1 (pid 7) was killed") -> RankEnded:
    return RankEnded(
        epoch=begin.epoch, rank=1, exit_code=-9, terminated_by_us=False, code="", reason="Killed", message=message
    )


def test_the_leader_accepts_only_pods_of_its_replica(replica: Start) -> None:
    pods = replica()
    leader = pods.add()
    leader.wait_for(phase="Waiting", progress="waiting for m-r0-1")
    assert leader.get("/ready") == (503, b'{"ready":false,"reason":"Waiting: waiting for m-r0-1"}')
    rejected: dict[str, dict[str, Any]] = {
        "its revision is 'b', that of pod 0 is 'a'": {"revision": "b"},
        "its tensor parallel is 4": {"tensor_parallel": 4},
        "its replica is 'm-r1'": {"replica": "m-r1"},
        "pod index 2 is out of range": {"pod_index": 2},
        "its link version is 99": {"version": 99},
    }
    for words, fields in rejected.items():
        peer = dial_leader(pods.ports["link"])
        peer.send(_join(**fields))
        assert words in peer.receive(Rejected).message
        peer.wait_for_end()
        peer.close()
    for garbage in (b'{"type":"leaving"}\n', b"GET / HTTP/1.1\r\n\r\n", b"x" * 300_000, b"[" * 5000 + b"\n"):
        peer = dial_leader(pods.ports["link"])
        peer.send_bytes(garbage)
        peer.wait_for_end()
        peer.close()
    assert leader.get("/live")[0] == leader.get("/startup")[0] == 200
    assert leader.status()["restarts"] == 0
    assert leader.children().keys() <= {"standby-engine"}
    leader.popen.send_signal(signal.SIGTERM)
    assert leader.popen.wait(60) == 0


def test_after_too_many_failed_starts_the_leader_stays_and_reports_the_failure(replica: Start) -> None:
    pods = replica("--max-restarts", "2")
    leader = pods.add()
    peer = _joined(pods)
    epochs = []
    for _ in range(3):
        begin = peer.receive(StartRanks)
        epochs.append(begin.epoch)
        assert begin.rendezvous == f"tcp://127.0.0.1:{pods.ports['rendezvous']}"
        peer.send(_killed(begin, "rank1 (pid 7) was killed by signal 9. Its last words:\n  | ouch"))
    assert epochs == sorted(set(epochs))
    assert "--max-restarts 2 within" in peer.receive(GaveUp).message
    peer.wait_for_end()
    status = leader.wait_for(phase="Failed")
    assert (status["restarts"], status["max_restarts"], status["ready"]) == (2, 2, False)
    failure = status["last_failure"]
    assert (failure["rank"], failure["pod"], failure["exit_code"], failure["reason"]) == (1, "m-r0-1", -9, "Killed")
    assert failure["message"].endswith("| ouch [pod m-r0-1]")
    assert leader.get("/live")[0] == 200
    assert leader.get("/ready")[0] == 503
    assert leader.children() == {}
    peer.close()
    leader.popen.send_signal(signal.SIGTERM)
    assert leader.popen.wait(60) == 0


def test_restart_budget_and_order_of_epochs_outlive_the_leader(replica: Start) -> None:
    pods = replica("--max-restarts", "1")
    leader = pods.add()
    peer = _joined(pods)
    first = peer.receive(StartRanks)
    peer.send(_killed(first))
    before = peer.receive(StartRanks)
    leader.close()
    peer.wait_for_end()
    leader.start()
    peer = _joined(pods)
    begin = peer.receive(StartRanks)
    assert begin.epoch > before.epoch > first.epoch
    status = leader.status()
    assert (status["restarts"], status["last_failure"]["exit_code"]) == (1, -9)
    peer.send(_killed(begin))
    peer.receive(GaveUp)
    leader.wait_for(phase="Failed")
    peer.close()


def test_a_permanent_start_error_is_not_retried(replica: Start) -> None:
    pods = replica()
    leader = pods.add()
    peer = _joined(pods)
    begin = peer.receive(StartRanks)
    peer.send(
        RankEnded(
            epoch=begin.epoch,
            rank=1,
            exit_code=1,
            terminated_by_us=False,
            code="missing_tensor",
            reason="InvalidModel",
            message="model.norm.weight is in no file",
        )
    )
    assert "model.norm.weight is in no file" in peer.receive(GaveUp).message
    status = leader.wait_for(phase="Failed")
    assert status["last_failure"]["reason"] == "InvalidModel"
    assert (status["restarts"], status["epoch"][1]) == (0, 1)


def test_a_lost_link_ends_the_epoch_and_the_pod_may_join_again(replica: Start) -> None:
    pods = replica()
    leader = pods.add()
    first = _joined(pods)
    begin = first.receive(StartRanks)
    # The newest link wins: a replaced pod may join before its old connection has timed out.
    second = dial_leader(pods.ports["link"])
    second.send(_join(pod="m-r0-1"))
    second.receive(Accepted)
    first.wait_for_end()
    again = second.receive(StartRanks)
    assert again.epoch == (begin.epoch[0], begin.epoch[1] + 1)
    second.close()
    status = leader.wait_for(phase="Waiting")
    assert "the link to its pod m-r0-1 was lost" in status["last_failure"]["message"]
    assert leader.children().keys() <= {"standby-engine"}, "the rank of pod 0 is dead before the pod may join again"
    third = _joined(pods)
    assert third.receive(StartRanks).epoch[1] == 3
    first.close()
    third.close()


def test_a_silent_pod_is_lost(replica: Start) -> None:
    pods = replica()
    leader = pods.add()
    peer = dial_leader(pods.ports["link"], silent=True)
    peer.send(_join())
    peer.receive(Accepted)
    peer.wait_for_end()
    leader.wait_for(phase="Waiting")
    leader.wait_for_words("the link to pod m-r0-1 is lost: no message for 10 s")
    peer.close()


def test_a_rank_that_survives_its_kill_is_reported(replica: Start) -> None:
    pods = replica()
    leader = pods.add()
    peer = _joined(pods)
    begin = peer.receive(StartRanks)
    eventually(lambda: "rank0" in leader.children())
    leader.kill_rank(0)
    peer.receive(KillRanks)
    # As a process in a call of its device driver, rank 1 does not exit.
    leader.wait_for_words("rank1 [pod m-r0-1]: still alive 5 s after SIGKILL")
    status = leader.status()
    assert (status["phase"], status["progress"]) == ("Restarting", "rank 1: waiting for the exit of its process")
    peer.send(_killed(begin))
    assert peer.receive(StartRanks).epoch[1] == 2
    peer.close()


def test_a_leader_that_is_stopped_during_a_start_releases_its_pods(replica: Start) -> None:
    pods = replica()
    leader = pods.add()
    peer = _joined(pods)
    begin = peer.receive(StartRanks)
    leader.popen.send_signal(signal.SIGTERM)
    peer.receive(KillRanks)
    peer.send(_killed(begin))
    peer.receive(Drained)
    assert leader.popen.wait(60) == 0
    peer.close()


@pytest.mark.parametrize(
    ("flags", "reason", "words"),
    [
        (("--tp", "7", "--ranks-per-pod", "7"), "TensorDoesNotDivideHeads", "cannot be split over 7 ranks"),
        (("--tp", "1", "--ranks-per-pod", "1"), "InvalidModel", "config.json"),
    ],
)
def test_a_model_that_cannot_be_served_fails_before_any_rank_starts(
    flags: tuple[str, ...], reason: str, words: str, replica: Start, tmp_path: Path
) -> None:
    broken = tmp_path / "model"
    shutil.copytree(tiny_checkpoint(), broken)
    if reason == "InvalidModel":
        (broken / "config.json").unlink()
    leader = replica(*flags, model=broken).add()
    status = leader.wait_for(phase="Failed")
    assert status["last_failure"]["reason"] == reason
    assert words in status["last_failure"]["message"]
    assert words in status["progress"]
    assert leader.children() == {}
    leader.popen.send_signal(signal.SIGTERM)
    assert leader.popen.wait(60) == 0


def test_a_member_pod_keeps_its_ranks_only_as_long_as_its_link(replica: Start) -> None:
    pods = replica()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pods.ports["link"] = listener.getsockname()[1]
        member = pods.add(index=1)
        leader = accept_member(listener)
        join = leader.receive(Join)
        assert (join.pod, join.pod_index, join.revision, join.topology.node) == ("m-r0-1", 1, "a", "node-1")
        assert member.get("/ready")[0] == 503
        leader.send(Rejected("its revision is 'a', that of pod 0 'b'"))
        leader.close()
        member.wait_for(phase="Waiting", progress="pod 0 has rejected this pod: its revision is 'a', that of pod 0 'b'")

        leader = accept_member(listener)
        leader.receive(Join)
        leader.send(Accepted())
        begin = StartRanks(epoch=(5, 1), rendezvous="tcp://127.0.0.1:9", first_device=None, nccl_host="")
        leader.send(begin)
        member.wait_for(ready=True)
        eventually(lambda: "rank1" in member.children())
        leader.close()
        leader = accept_member(listener)
        leader.receive(Join)
        assert "rank1" not in member.children(), "a pod joins without running ranks"

        leader.send(Accepted())
        leader.send(StartRanks(epoch=(5, 2), rendezvous="tcp://127.0.0.1:9", first_device=None, nccl_host=""))
        eventually(lambda: "rank1" in member.children())
        leader.send(KillRanks((5, 1)))
        leader.receive(RankProgress)
        member.kill_rank(1)
        ended = leader.receive(RankEnded)
        assert (ended.epoch, ended.rank, ended.exit_code, ended.terminated_by_us) == ((5, 2), 1, -9, False)

        leader.send(StartRanks(epoch=(5, 3), rendezvous="tcp://127.0.0.1:9", first_device=None, nccl_host=""))
        leader.receive(RankProgress)
        leader.send(KillRanks((5, 3)))
        assert leader.receive(RankEnded).terminated_by_us

        leader.send(GaveUp("rank0 was killed"))
        leader.close()
        leader = accept_member(listener)
        leader.receive(Join)
        member.wait_for(phase="Failed", progress="the replica has failed: rank0 was killed")
        leader.send(Accepted())
        member.wait_for(phase="Waiting", ready=True)

        member.popen.send_signal(signal.SIGTERM)
        leader.receive(DrainRequested)
        assert member.popen.poll() is None
        leader.send(Drained())
        assert member.popen.wait(60) == 0
        leader.close()


def test_a_member_pod_without_a_leader_stops_immediately(replica: Start) -> None:
    pods = replica()
    member = pods.add(index=1)
    eventually(lambda: "cannot be reached" in member.log.read_text())
    status = member.status()
    assert (status["phase"], status["ready"], status["pod_index"]) == ("Waiting", False, 1)
    member.popen.send_signal(signal.SIGTERM)
    assert member.popen.wait(60) == 0
