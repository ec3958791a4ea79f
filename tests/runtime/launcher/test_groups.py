"""Processes that `serve` starts, and how their specs differ between starts of a group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minisgl.config import EngineConfig
from minisgl.frontend.config import RequestLimits
from minisgl.launcher.endpoint import Endpoint
from minisgl.launcher.group import GroupSpec
from minisgl.launcher.process import ProcessSpec
from minisgl.launcher.restarts import Limits
from minisgl.launcher.serve import ServeOptions, groups
from support.tiny_checkpoint import tiny_checkpoint

_RESTARTS = Limits(startup_timeout=1.0, max_restarts=3, restart_window=600.0)


def _groups(tmp_path: Path, **options: Any) -> dict[str, dict[int, list[ProcessSpec]]]:
    """Group → number of the start → specs, for the first two starts."""
    engine = EngineConfig(model=str(tiny_checkpoint()), tensor_parallel=2)
    served = ServeOptions(engine=engine, model_name="tiny", restarts=_RESTARTS, drain_timeout=1.0, **options)
    return {group.name: {n: _specs(group, n) for n in (1, 2)} for group in groups(served, tmp_path, 7)}


def _specs(group: GroupSpec, number: int) -> list[ProcessSpec]:
    return [spec for spec in group.processes(number) if isinstance(spec, ProcessSpec)]


def test_ranks_are_one_group_and_every_other_process_is_its_own(tmp_path: Path) -> None:
    groups = _groups(tmp_path, endpoint=Endpoint(tokenizers=2))
    names = {name: [spec.name for spec in starts[1]] for name, starts in groups.items()}
    assert names == {
        "engine": ["rank0", "rank1"],
        "tokenizer0": ["tokenizer0"],
        "tokenizer1": ["tokenizer1"],
        "frontend": ["frontend"],
    }
    assert list(_groups(tmp_path, endpoint=Endpoint(tokenizers=0))) == ["engine", "frontend"]


def test_requests_may_use_every_served_name(tmp_path: Path) -> None:
    (tokenizer,) = _groups(tmp_path, other_names=("also",))["tokenizer0"][1]
    assert tokenizer.config.names == ("tiny", "also")


def test_a_restarted_engine_has_a_later_epoch_a_new_rendezvous_and_the_same_addresses(tmp_path: Path) -> None:
    starts = _groups(tmp_path)["engine"]
    (first, worker1), (second, worker2) = starts[1], starts[2]
    assert first.config.epoch[0] == second.config.epoch[0]
    assert (first.config.epoch[1], second.config.epoch[1]) == (1, 2)
    assert (first.config.address, first.config.plan_addresses) == (second.config.address, second.config.plan_addresses)
    assert worker1.config.plans == worker2.config.plans
    assert first.config.engine.rendezvous != second.config.engine.rendezvous
    assert second.config.engine.rendezvous == worker2.config.engine.rendezvous


def test_the_frontend_listens_on_the_launchers_socket_at_every_start(tmp_path: Path) -> None:
    starts = _groups(tmp_path)["frontend"]
    assert starts[1] == starts[2]
    config = starts[1][0].config
    assert config.socket_fd == 7
    # The other one counts lines of the log that are lost.
    assert starts[1][0].descriptors == (7, config.lost_lines_fd)


def test_a_request_that_meets_a_hanging_engine_may_wait_for_the_next_one(tmp_path: Path) -> None:
    limits = RequestLimits(stall_seconds=7.0, queue_seconds=8.0)
    (frontend,) = _groups(tmp_path, limits=limits)["frontend"][1]
    assert frontend.config.accept_seconds == 15.0
