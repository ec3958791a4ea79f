"""Specs of rank processes differ only in addresses and devices."""

from __future__ import annotations

from pathlib import Path

import msgspec

from minisgl.config import EngineConfig
from minisgl.launcher.rank_specs import ipc_plans, prepared_specs, rank_specs
from minisgl.scheduler.process import SchedulerProcessConfig

_ENGINE = EngineConfig(model="/models/x", tensor_parallel=4, rendezvous="file:///run/rendezvous1")
_ALL = range(4)
_PLANS = ipc_plans(Path("/run"), _ALL)


def test_rank_0_has_no_plans_address() -> None:
    assert _PLANS == {1: "ipc:///run/plans1", 2: "ipc:///run/plans2", 3: "ipc:///run/plans3"}


def test_a_caller_that_is_rank_0_itself_gets_the_worker_ranks() -> None:
    specs = rank_specs(_ENGINE, _ALL, _PLANS)
    assert [spec.name for spec in specs] == ["rank1", "rank2", "rank3"]
    assert [spec.config.plans for spec in specs] == list(_PLANS.values())
    assert [spec.config.engine.rank for spec in specs] == [1, 2, 3]
    assert {spec.config.engine.rendezvous for spec in specs} == {"file:///run/rendezvous1"}
    assert {spec.target for spec in specs} == {"minisgl.launcher.roles:worker_rank"}


def test_rank_0_gets_the_configuration_of_the_scheduler() -> None:
    scheduler = SchedulerProcessConfig(engine=_ENGINE, address="ipc:///run/scheduler", model_name="x")
    rank0, *workers = rank_specs(_ENGINE, _ALL, _PLANS, scheduler)
    assert (rank0.name, rank0.target, rank0.config) == ("rank0", "minisgl.launcher.roles:rank0", scheduler)
    assert workers == rank_specs(_ENGINE, _ALL, _PLANS)


def test_ranks_of_a_machine_without_a_first_device_use_the_devices_of_their_numbers() -> None:
    engine = EngineConfig(model="/models/x", device="cuda", tensor_parallel=4)
    assert [spec.config.engine.device_index for spec in rank_specs(engine, _ALL, _PLANS)] == [None] * 3
    second_pod = rank_specs(engine, range(2, 4), _PLANS, first_device=5)
    assert [spec.config.engine.device_index for spec in second_pod] == [5, 6]


def test_process_ids_are_constrained_only_where_pods_share_devices() -> None:
    cuda = EngineConfig(model="/models/x", device="cuda", tensor_parallel=4)
    assert {spec.pid_residue for spec in rank_specs(cuda, _ALL, _PLANS)} == {(0, 1)}
    assert {spec.pid_residue for spec in rank_specs(_ENGINE, range(2, 4), _PLANS)} == {(0, 1)}
    assert [spec.pid_residue for spec in rank_specs(cuda, range(2, 4), _PLANS)] == [(2, 4), (3, 4)]


def test_prepared_specs_differ_from_ranks_only_in_their_work() -> None:
    engine = EngineConfig(model="/models/x", device="cuda", tensor_parallel=4)
    scheduler = SchedulerProcessConfig(engine=engine, address="ipc:///run/scheduler", model_name="x", drains=True)
    for ranks in (range(2), range(2, 4)):
        specs = rank_specs(engine, ranks, _PLANS, scheduler)
        workless = [msgspec.structs.replace(spec, config=None, drains=False) for spec in specs]
        assert workless == prepared_specs(engine, ranks, alone=False)


def test_only_ranks_that_open_no_gpu_meanwhile_wait_for_the_imports_of_a_standby() -> None:
    ranks = range(2)
    cuda, cpu = (EngineConfig(model="/models/x", device=device, tensor_parallel=2) for device in ("cuda", "cpu"))
    assert prepared_specs(cuda, ranks, alone=True) == []
    assert [spec.name for spec in prepared_specs(cpu, ranks, alone=True)] == ["rank0", "rank1"]
