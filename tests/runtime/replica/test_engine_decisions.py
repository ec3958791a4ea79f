"""Decisions and reports of an engine pod's launcher, without processes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from minisgl.config import EngineConfig
from minisgl.launcher import control
from minisgl.launcher.restarts import GroupState, Limits
from minisgl.replica.diagnosis import root_cause
from minisgl.replica.epoch import EpochPlan, MemberAddress, member_pod_specs, plan_epoch
from minisgl.replica.failures import count_oom_kills, failure_reason
from minisgl.replica.messages import PodTopology, RankEnded
from minisgl.replica.options import EngineOptions, Ports, ReplicaIdentity
from minisgl.replica.remote_rank import RemoteRank
from minisgl.replica.report import replica_phase, short_transport
from minisgl.replica.restart_log import RestartLog
from minisgl.replica.start_timings import StartTimings, reached_stage
from minisgl.replica.topology import first_devices, on_same_host
from minisgl.wire.status import Failure, RankStatus


def _exited(rank: int, exit_code: int | None, killed: bool = False) -> RemoteRank:
    """A dead rank; without an exit code, its pod was lost."""
    process = RemoteRank(rank, "p", lambda: None)
    if exit_code is None:
        process.disconnected("lost")
    else:
        process.update(
            RankEnded(
                epoch=(1, 1),
                rank=rank,
                exit_code=exit_code,
                terminated_by_us=killed,
                code="",
                reason="Error",
                message="",
            )
        )
    return process


@pytest.mark.parametrize(
    ("processes", "name"),
    [
        ([_exited(0, 1), _exited(1, -9)], "rank1"),
        ([_exited(0, -9, killed=True), _exited(1, 1)], "rank1"),
        ([_exited(0, 1), _exited(1, 1)], "rank0"),
        ([_exited(0, 1), _exited(1, None)], "rank0"),
        ([_exited(0, -9, killed=True), _exited(1, -9, killed=True)], None),
    ],
)
def test_the_root_cause_is_the_killed_rank_and_not_one_that_waited_for_it(
    processes: list[RemoteRank], name: str | None
) -> None:
    found = root_cause(processes)
    assert (None if found is None else found.name) == name


@pytest.mark.parametrize(
    ("exit_code", "code", "words", "oom", "reason"),
    [
        (-9, "", "", False, "Killed"),
        (-9, "", "", True, "OutOfMemory"),
        (-15, "", "", False, "Killed"),
        (-11, "", "", False, "Error"),
        (1, "", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", False, "OutOfMemory"),
        (1, "", "RuntimeError: the device fell off the bus", True, "Error"),
        (1, "tensor_does_not_divide", "", False, "TensorDoesNotDivideHeads"),
        (1, "missing_tensor", "", False, "InvalidModel"),
        (1, "out_of_memory", "", False, "OutOfMemory"),
        (1, "rendezvous_failed", "", False, "Error"),
    ],
)
def test_the_reason_follows_from_exit_code_start_error_and_last_words(
    exit_code: int, code: str, words: str, oom: bool, reason: str
) -> None:
    start_error = control.StartError(code, "") if code else None
    assert failure_reason(exit_code, start_error, words, oom_killed=oom) == reason


def test_oom_kills_are_counted_under_both_versions_of_cgroups(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("low 0\noom 3\noom_kill 2\n")
    (tmp_path / "control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert count_oom_kills([tmp_path / "none", tmp_path / "events"]) == 2
    assert count_oom_kills([tmp_path / "control"]) == 1
    assert count_oom_kills([tmp_path / "none"]) == 0


def test_the_restart_log_counts_failures_within_the_window_and_survives_damage(tmp_path: Path) -> None:
    path = tmp_path / "new" / "restarts.json"
    now = datetime(2026, 1, 1, tzinfo=UTC)
    restart_log = RestartLog(path)
    for age in (5000, 100, 1):
        at = (now - timedelta(seconds=age)).isoformat()
        restart_log.add(Failure(at=at, rank=0, pod="p", exit_code=-9, reason="Killed", message="words"))
    assert RestartLog(path).failures == restart_log.failures
    assert RestartLog(path).ages(now, 3600) == [100, 1]
    path.write_bytes(path.read_bytes()[:-5])
    assert RestartLog(path).failures == []


def test_timings_have_an_entry_for_each_stage() -> None:
    timings = StartTimings(10.0)
    assert timings.seconds() == {}
    timings.reached("join", 11.0)
    timings.reached("start", 13.0)
    timings.reached("start", 14.0)
    assert timings.seconds() == {"reap": 1.0, "join": 0.0, "start": 2.0}
    timings.reached("serve", 16.0)
    assert timings.seconds()["total"] == 6.0
    assert timings.complete


@pytest.mark.parametrize(
    ("ranks", "stage"),
    [
        ([], None),
        ([(False, "starting"), (False, "weights 3%")], None),
        ([(False, "rendezvous"), (False, "weights 3%")], "start"),
        ([(False, "weights 100%"), (True, "KV pool 100%")], "rendezvous"),
        ([(False, "CUDA graphs 40%"), (True, "KV pool 100%")], "load"),
        ([(True, ""), (True, "")], "serve"),
    ],
)
def test_a_start_has_reached_the_stage_of_its_slowest_rank(ranks: list[tuple[bool, str]], stage: str | None) -> None:
    assert reached_stage(ranks) == stage


def _rank(phase: Any) -> RankStatus:
    return RankStatus(rank=0, pod="p", node="", phase=phase, progress="")


@pytest.mark.parametrize(
    ("group", "rank", "draining", "phase"),
    [
        (GroupState("waiting"), "Waiting", False, "Waiting"),
        (GroupState("starting", 0, 1), "Rendezvous", False, "Rendezvous"),
        (GroupState("starting", 0, 1), "Loading", False, "Loading"),
        (GroupState("starting", 0, 2), "Loading", False, "Restarting"),
        (GroupState("terminating", 0, 1), "Restarting", False, "Restarting"),
        (GroupState("ready", 0, 3), "Ready", False, "Ready"),
        (GroupState("ready", 0, 3), "Ready", True, "Draining"),
    ],
)
def test_the_phase_of_a_replica_follows_from_group_and_ranks(
    group: GroupState, rank: str, draining: bool, phase: str
) -> None:
    assert replica_phase(group, [_rank(rank)], draining=draining) == phase


def test_transports_in_the_status_are_shortened() -> None:
    texts = ("gloo, TCP over loopback", "NCCL, P2P/IPC over NVLink", "NCCL, NET/Socket", "none (one rank)")
    assert [short_transport(text) for text in texts] == ["gloo", "P2P/IPC", "NET/Socket", ""]


_A, _B = "a" * 32, "b" * 32


def _topology(node: str = "n", devices: tuple[str, ...] = (_A, _B), shm_device: int = 3) -> PodTopology:
    return PodTopology(node=node, devices=devices, shm_device=shm_device)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (_topology(), True),
        (_topology(devices=(_B, _A)), True),
        (_topology(node="m"), False),
        (_topology(shm_device=4), False),
        (_topology(devices=(_A,)), False),
    ],
)
def test_pods_count_as_one_host_only_when_they_share_node_memory_and_devices(
    other: PodTopology, expected: bool
) -> None:
    assert on_same_host([_topology(), other], 2) is expected


def test_unknown_topology_never_counts_as_one_host() -> None:
    assert not on_same_host([_topology(node="")] * 2, 2)
    assert not on_same_host([_topology(shm_device=-1)] * 2, 2)
    assert not on_same_host([_topology()] * 3, 3), "a rank would have no device of its own"


def test_pods_that_see_the_same_devices_divide_them() -> None:
    own, other_node = _topology(devices=(_A,)), _topology("m")
    assert first_devices([_topology(), _topology(), other_node], 1) == [0, 1, 0]
    assert first_devices([_topology(devices=(_A,)), _topology(devices=(_B,))], 1) == [0, 0]
    assert first_devices([own, own], 1) == [0, 0], "there are too few; each rank reports that itself"


def _options(pod_index: int = 0, device: Any = "cuda", ranks_per_pod: int = 2) -> EngineOptions:
    return EngineOptions(
        engine=EngineConfig(model="/models/x", device=device, tensor_parallel=4),
        identity=ReplicaIdentity(replica="m-r0", revision="a", tensor_parallel=4, ranks_per_pod=ranks_per_pod),
        model_name="tiny",
        pod_index=pod_index,
        pod=f"m-r0-{pod_index}",
        node="n",
        leader="m-r0-0.m-r0",
        ports=Ports(),
        limits=Limits(max_restarts=1, restart_window=1.0, startup_timeout=1.0, retry_start=True),
        drain_timeout=1.0,
        directory=Path("/run/minisgl"),
    )


def _plan(options: EngineOptions, members: list[MemberAddress], **changes: Any) -> EpochPlan:
    facts: dict[str, Any] = {
        "topology": _topology(devices=(_A, _B, "c", "d")),
        "sockets": Path("/tmp/s"),
        "tokenizer_hashes": {"tokenizer.json": "00"},
        "try_same_host": True,
        "plans_token": "5e9f0a77",
    }
    return plan_epoch(options, (7, 3), members=members, **(facts | changes))


def test_ranks_of_an_epoch_differ_only_in_rank_device_and_plan_address() -> None:
    other = MemberAddress(host="fd00::2", leader_host="fd00::1", topology=_topology(devices=(_A, _B, "c", "d")))
    plan = _plan(_options(), [other])
    [message] = plan.messages
    assert message.rendezvous == "tcp://[fd00::1]:5552"
    assert (message.first_device, message.nccl_host, plan.same_host) == (2, "n", True)
    ranks = [*plan.local, *member_pod_specs(_options(pod_index=1), message)]
    engines = [rank.config.engine for rank in ranks]
    assert [rank.name for rank in ranks] == ["rank0", "rank1", "rank2", "rank3"]
    assert [engine.rank for engine in engines] == [0, 1, 2, 3]
    assert [engine.device_index for engine in engines] == [0, 1, 2, 3]
    assert {engine.rendezvous for engine in engines} == {message.rendezvous}
    assert {engine.nccl_host for engine in engines} == {"n"}
    assert [rank.pid_residue for rank in ranks] == [(rank, 4) for rank in range(4)]
    assert [rank.drains for rank in ranks] == [True, False, False, False]
    scheduler = plan.local[0].config
    assert scheduler.plan_addresses == ("ipc:///tmp/s/plans1", "tcp://[fd00::2]:5562", "tcp://[fd00::2]:5563")
    assert [rank.config.plans for rank in ranks[1:]] == ["ipc:///tmp/s/plans1", "tcp://*:5562", "tcp://*:5563"]
    assert (scheduler.epoch, scheduler.replica, scheduler.replica_revision) == ((7, 3), "m-r0", "a")
    # Others can reach the ports of the member pod only.
    assert scheduler.plans_token == "5e9f0a77"
    assert [rank.config.token for rank in ranks[1:]] == ["", "5e9f0a77", "5e9f0a77"]


def test_nccl_finds_hosts_itself_when_pods_are_apart_or_one_host_has_failed() -> None:
    near = MemberAddress(host="10.0.0.2", leader_host="10.0.0.1", topology=_topology(devices=(_A, _B, "c", "d")))
    far = MemberAddress(host="10.0.0.2", leader_host="10.0.0.1", topology=_topology("m", (_A, _B, "c", "d")))
    for plan in (_plan(_options(), [far]), _plan(_options(), [near], try_same_host=False)):
        assert not plan.same_host
        assert plan.messages[0].nccl_host == plan.local[0].config.engine.nccl_host == ""


def test_ranks_of_one_pod_use_no_network() -> None:
    plan = _plan(_options(device="cpu", ranks_per_pod=4), [])
    assert plan.messages == []
    assert plan.local[0].config.engine.rendezvous == "file:///tmp/s/rendezvous3"
    assert all(address.startswith("ipc://") for address in plan.local[0].config.plan_addresses)
    assert plan.local[0].config.engine.device_index is None
    assert plan.local[0].pid_residue == (0, 1)
