"""What an engine pod's launcher decides and says, without processes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from minisgl.config import EngineConfig
from minisgl.launcher import control
from minisgl.launcher.restarts import GroupState, Limits
from minisgl.replica.epoch import EpochPlan, OtherPod, member_pod_ranks, plan_epoch
from minisgl.replica.failures import Death, cause, count_oom_kills, reason_of
from minisgl.replica.options import EngineOptions, Ports
from minisgl.replica.pods import Expected
from minisgl.replica.restart_log import History
from minisgl.replica.status import replica_phase, short_transport
from minisgl.replica.timeline import Timeline, stage_of
from minisgl.replica.topology import Place, are_neighbours, first_devices
from minisgl.wire.status import Failure, RankStatus


def _death(rank: int, exit_code: int | None, told: bool = False) -> Death:
    return Death(rank=rank, pod="p", exit_code=exit_code, told_to_end=told, reason="Error", message="")


@pytest.mark.parametrize(
    ("deaths", "rank"),
    [
        ([_death(0, 1), _death(1, -9)], 1),
        ([_death(0, -9, told=True), _death(1, 1)], 1),
        ([_death(0, 1), _death(1, 1)], 0),
        ([_death(0, 1), _death(1, None)], 0),
        ([_death(0, -9, told=True), _death(1, -9, told=True)], None),
    ],
)
def test_the_cause_is_who_was_killed_and_not_who_missed_it(deaths: list[Death], rank: int | None) -> None:
    found = cause(deaths)
    assert (None if found is None else found.rank) == rank


@pytest.mark.parametrize(
    ("exit_code", "refusal", "words", "oom", "reason"),
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
def test_reasons(exit_code: int, refusal: str, words: str, oom: bool, reason: str) -> None:
    said = control.Refused(refusal, "") if refusal else None
    assert reason_of(exit_code, said, words, oom_killed=oom) == reason


def test_oom_kills_are_read_from_either_kind_of_cgroup(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("low 0\noom 3\noom_kill 2\n")
    (tmp_path / "control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert count_oom_kills([tmp_path / "none", tmp_path / "events"]) == 2
    assert count_oom_kills([tmp_path / "control"]) == 1
    assert count_oom_kills([tmp_path / "none"]) == 0


def test_history_counts_what_is_within_the_window_and_survives_damage(tmp_path: Path) -> None:
    path = tmp_path / "new" / "restarts.json"
    now = datetime(2026, 1, 1, tzinfo=UTC)
    history = History(path)
    for age in (5000, 100, 1):
        at = (now - timedelta(seconds=age)).isoformat()
        history.add(Failure(at=at, rank=0, pod="p", exit_code=-9, reason="Killed", message="words"))
    assert History(path).failures == history.failures
    assert History(path).ages(now, 3600) == [100, 1]
    path.write_bytes(path.read_bytes()[:-5])
    assert History(path).failures == []


def test_a_timeline_has_a_part_for_each_stage() -> None:
    timeline = Timeline(10.0)
    assert timeline.seconds() == {}
    timeline.reach("join", 11.0)
    timeline.reach("start", 13.0)
    timeline.reach("start", 14.0)
    assert timeline.seconds() == {"reap": 1.0, "join": 0.0, "start": 2.0}
    timeline.reach("serve", 16.0)
    assert timeline.seconds()["total"] == 6.0
    assert timeline.complete


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
def test_a_start_is_as_far_as_its_last_rank(ranks: list[tuple[bool, str]], stage: str | None) -> None:
    assert stage_of(ranks) == stage


def _rank(phase: Any) -> RankStatus:
    return RankStatus(rank=0, pod="p", node="", phase=phase, progress="")


@pytest.mark.parametrize(
    ("group", "rank", "draining", "phase"),
    [
        (GroupState("waiting"), "Waiting", False, "Waiting"),
        (GroupState("starting", 0, 1), "Rendezvous", False, "Rendezvous"),
        (GroupState("starting", 0, 1), "Loading", False, "Loading"),
        (GroupState("starting", 0, 2), "Loading", False, "Restarting"),
        (GroupState("ending", 0, 1), "Restarting", False, "Restarting"),
        (GroupState("ready", 0, 3), "Ready", False, "Ready"),
        (GroupState("ready", 0, 3), "Ready", True, "Draining"),
    ],
)
def test_phases(group: GroupState, rank: str, draining: bool, phase: str) -> None:
    assert replica_phase(group, [_rank(rank)], draining=draining) == phase


def test_transports_in_the_status_are_short() -> None:
    texts = ("gloo, TCP over loopback", "NCCL, P2P/IPC over NVLink", "NCCL, NET/Socket", "none (one rank)")
    assert [short_transport(text) for text in texts] == ["gloo", "P2P/IPC", "NET/Socket", ""]


_A, _B = "a" * 32, "b" * 32


def _place(node: str = "n", devices: tuple[str, ...] = (_A, _B), shm_device: int = 3) -> Place:
    return Place(node=node, devices=devices, shm_device=shm_device)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (_place(), True),
        (_place(devices=(_B, _A)), True),
        (_place(node="m"), False),
        (_place(shm_device=4), False),
        (_place(devices=(_A,)), False),
    ],
)
def test_pods_are_neighbours_only_when_nothing_divides_them(other: Place, expected: bool) -> None:
    assert are_neighbours([_place(), other], 2) is expected


def test_nothing_that_is_not_known_makes_neighbours() -> None:
    assert not are_neighbours([_place(node="")] * 2, 2)
    assert not are_neighbours([_place(shm_device=-1)] * 2, 2)
    assert not are_neighbours([_place()] * 3, 3), "a rank would have no device of its own"


def test_pods_that_see_the_same_devices_share_them_out() -> None:
    own, other_node = _place(devices=(_A,)), _place("m")
    assert first_devices([_place(), _place(), other_node], 1) == [0, 1, 0]
    assert first_devices([_place(devices=(_A,)), _place(devices=(_B,))], 1) == [0, 0]
    assert first_devices([own, own], 1) == [0, 0], "they do not suffice; each says so itself"


def _options(pod_index: int = 0, device: Any = "cuda", ranks_per_pod: int = 2) -> EngineOptions:
    return EngineOptions(
        engine=EngineConfig(model="/models/x", device=device, tensor_parallel=4),
        expected=Expected(replica="m-r0", revision="a", tensor_parallel=4, ranks_per_pod=ranks_per_pod),
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


def _plan(options: EngineOptions, others: list[OtherPod], **changes: Any) -> EpochPlan:
    facts: dict[str, Any] = {
        "place": _place(devices=(_A, _B, "c", "d")),
        "sockets": Path("/tmp/s"),
        "tokenizer_hashes": {"tokenizer.json": "00"},
        "try_neighbours": True,
    }
    return plan_epoch(options, (7, 3), others=others, **(facts | changes))


def test_every_rank_of_an_epoch_is_told_the_same_but_for_its_place() -> None:
    other = OtherPod(host="fd00::2", leader_host="fd00::1", place=_place(devices=(_A, _B, "c", "d")))
    plan = _plan(_options(), [other])
    [begin] = plan.begin
    assert begin.rendezvous == "tcp://[fd00::1]:5552"
    assert (begin.first_device, begin.nccl_host, plan.neighbours) == (2, "n", True)
    ranks = [*plan.local, *member_pod_ranks(_options(pod_index=1), begin)]
    engines = [rank.config.engine for rank in ranks]
    assert [rank.name for rank in ranks] == ["rank0", "rank1", "rank2", "rank3"]
    assert [engine.rank for engine in engines] == [0, 1, 2, 3]
    assert [engine.device_index for engine in engines] == [0, 1, 2, 3]
    assert {engine.rendezvous for engine in engines} == {begin.rendezvous}
    assert {engine.nccl_host for engine in engines} == {"n"}
    assert [rank.pid_residue for rank in ranks] == [(rank, 4) for rank in range(4)]
    assert [rank.drains for rank in ranks] == [True, False, False, False]
    scheduler = plan.local[0].config
    assert scheduler.followers == ("ipc:///tmp/s/plans1", "tcp://[fd00::2]:5562", "tcp://[fd00::2]:5563")
    assert [rank.config.plans for rank in ranks[1:]] == ["ipc:///tmp/s/plans1", "tcp://*:5562", "tcp://*:5563"]
    assert (scheduler.epoch, scheduler.replica, scheduler.replica_revision) == ((7, 3), "m-r0", "a")


def test_nccl_is_left_alone_where_pods_are_no_neighbours_or_it_failed() -> None:
    near = OtherPod(host="10.0.0.2", leader_host="10.0.0.1", place=_place(devices=(_A, _B, "c", "d")))
    far = OtherPod(host="10.0.0.2", leader_host="10.0.0.1", place=_place("m", (_A, _B, "c", "d")))
    for plan in (_plan(_options(), [far]), _plan(_options(), [near], try_neighbours=False)):
        assert not plan.neighbours
        assert plan.begin[0].nccl_host == plan.local[0].config.engine.nccl_host == ""


def test_one_pod_needs_no_network_between_its_ranks() -> None:
    plan = _plan(_options(device="cpu", ranks_per_pod=4), [])
    assert plan.begin == []
    assert plan.local[0].config.engine.rendezvous == "file:///tmp/s/rendezvous3"
    assert all(address.startswith("ipc://") for address in plan.local[0].config.followers)
    assert plan.local[0].config.engine.device_index is None
    assert plan.local[0].pid_residue is None
