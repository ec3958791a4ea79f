"""Cores and process ids inside a container."""

from __future__ import annotations

import os
import selectors
from pathlib import Path

import pytest

from minisgl.launcher import devices
from minisgl.launcher.group import Group, GroupSpec
from minisgl.launcher.process import Process, ProcessSpec, Standby


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "9900000 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
    ],
)
def test_a_cpu_limit_lowers_the_number_of_cores(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert devices._cores(tmp_path) == cores


@pytest.mark.parametrize("file", ["memory.max", "memory/memory.limit_in_bytes"])
def test_ranks_share_the_memory_of_the_machine_or_container(file: str, tmp_path: Path) -> None:
    whole = devices.device_memory("cpu", 1, tmp_path)
    assert whole is not None
    assert devices.device_memory("cpu", 2, tmp_path) == whole // 2
    (tmp_path / file).parent.mkdir(exist_ok=True)
    for text, memory in (("max\n", whole), (f"{1 << 60}\n", whole), ("4096\n", 4096)):
        (tmp_path / file).write_text(text)
        assert devices.device_memory("cpu", 1, tmp_path) == memory


@pytest.mark.parametrize("rank", [0, 2])
def test_a_process_id_has_the_residue_that_its_spec_asks_for(rank: int) -> None:
    target = "no_such_module:run"
    spec = ProcessSpec(name="rank", target=target, config=None, preload=("email.mime.text",), pid_residue=(rank, 3))
    with selectors.DefaultSelector() as selector:
        standby = Standby("ranks", spec, selector, "info", print, wait_for_cores=False)
        process = Process(spec, selector, "info", print, standby)
        while process.alive:
            for key, _ in selector.select(0.1):
                key.data()
        assert process.pid % 3 == rank
        process.close()
        standby.kill_and_close()


def test_a_process_id_that_never_comes_is_a_start_error() -> None:
    spec = ProcessSpec(name="rank", target="", config=None, preload=("email.mime.text",), pid_residue=(1, 1))
    with selectors.DefaultSelector() as selector:
        standby = Standby("ranks", spec, selector, "info", print, wait_for_cores=False)
        process = Process(spec, selector, "info", print, standby)
        while process.alive:
            for key, _ in selector.select(0.1):
                key.data()
        assert process.describe_exit() == (
            "rank: no process id that is 1 modulo 1 came: other processes start in this container all the time; remove "
            "them (no_process_id)"
        )
        assert standby.alive
        process.close()
        standby.kill_and_close()


def test_process_ids_are_chosen_without_a_standby_from_before() -> None:
    specs = [
        ProcessSpec(
            name=f"rank{rank}", target="no_such_module:run", config=None, preload=("email",), pid_residue=(rank, 5)
        )
        for rank in (1, 3)
    ]
    with selectors.DefaultSelector() as selector:
        group = Group(GroupSpec(name="engine", processes=lambda number: specs), selector, "info", print)
        group.start(1)
        while group.observe().alive:
            for key, _ in selector.select(0.1):
                key.data()
        assert [each.pid % 5 for each in group.processes if isinstance(each, Process)] == [1, 3]
        group.kill_and_close()
