"""Groups of stub processes under a real launcher process: starts, exits, signals."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from minisgl.launcher.group import Group, GroupSpec
from minisgl.launcher.process import Process, ProcessSpec
from minisgl.launcher.restarts import Limits
from minisgl.launcher.supervisor import Supervisor
from support.frontend.served import eventually, is_fork, launched_by
from support.launcher.group import Launch

_TESTS = Path(__file__).parents[2]
_RUNTIME = _TESTS.parent / "runtime"


END_SECONDS = 10.0
"""Longest time from an exit in a running group until all its processes have exited."""

BREAK_OFF_SECONDS = 5.0
"""Longest time from a second signal until all processes have exited."""


class Launched:
    """A launcher with its group, and its output."""

    def __init__(self, launch: Launch, temporary: Path) -> None:
        path = os.pathsep.join((str(_RUNTIME), str(_TESTS)))
        self.log = temporary / "stderr"
        with self.log.open("w") as stderr:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "support.launcher.group", msgspec.json.encode(launch).decode()],
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(temporary)},
                text=True,
            )
        self.pids: dict[str, int] = {}
        self.run_directory = Path()

    def wait_until_ready(self) -> None:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, self.log.read_text()
        ready: dict[str, Any] = json.loads(line)
        self.pids.update(ready["pids"])
        self.run_directory = Path(ready["run_directory"])
        assert self.run_directory.is_dir()

    def children(self) -> dict[str, int]:
        """Name → process id of the live processes."""
        return launched_by(self.popen.pid)

    def wait_for_words(self, words: str) -> None:
        eventually(lambda: words in self.log.read_text())

    def wait_for_end(self, seconds: float = 30.0) -> int:
        """Wait for the exit code. The time includes starts in progress on a busy machine."""
        return self.popen.wait(seconds)

    def gone(self) -> bool:
        """No process and no run directory of the group is left."""
        return not any(map(_runs, self.pids.values())) and not self.run_directory.exists()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def start(*specs: ProcessSpec, then: dict[str, ProcessSpec] | None = None, **limits: Any) -> Launched:
        """Ranks are one group, every other process is its own. `then` replaces specs at restarts."""
        groups: dict[str, list[list[ProcessSpec]]] = {}
        for number in range(2):
            for spec in specs:
                name = "engine" if spec.name.startswith("rank") else spec.name
                starts = groups.setdefault(name, [])
                if len(starts) == number:
                    starts.append([])
                starts[number].append((then or {}).get(spec.name, spec) if number else spec)
        launched = Launched(Launch(groups=groups, **limits), tmp_path)
        started.append(launched)
        return launched

    yield start
    for launched in started:
        launched.popen.kill()
        launched.popen.wait()
        assert launched.popen.stdout is not None
        launched.popen.stdout.close()


@pytest.fixture
def spec(tmp_path: Path) -> Callable[..., ProcessSpec]:
    def make(name: str, target: str, **config: object) -> ProcessSpec:
        settings = {"notes": str(tmp_path), **config}
        return ProcessSpec(
            name=name, target=f"support.launcher.stubs:{target}", config=settings, drains=target == "front"
        )

    return make


Spec = Callable[..., ProcessSpec]
Start = Callable[..., Launched]


def _group(spec: Spec) -> list[ProcessSpec]:
    return [spec("rank0", "serve"), spec("rank1", "serve"), spec("tokenizer0", "serve"), spec("frontend", "front")]


@pytest.mark.parametrize("victim", ["rank0", "rank1", "tokenizer0", "frontend"])
def test_without_restarts_any_exit_stops_all_processes_and_is_reported(
    victim: str, launch: Start, spec: Spec, tmp_path: Path
) -> None:
    launched = launch(*_group(spec))
    launched.wait_until_ready()
    assert Path(f"/proc/{launched.pids[victim]}/comm").read_text() == f"minisgl-{victim}"[:15] + "\n"
    os.kill(launched.pids[victim], signal.SIGKILL)
    assert launched.wait_for_end(END_SECONDS) == 1
    assert launched.gone()
    log = launched.log.read_text()
    assert f"restarts_exhausted: {victim} (pid {launched.pids[victim]}) was killed by signal 9 (SIGKILL)" in log
    if victim != "frontend":
        assert victim in (tmp_path / "failed").read_text()


def test_the_last_words_contain_the_exception(launch: Start, spec: Spec) -> None:
    launched = launch(spec("rank0", "raise_after_ready", words="the device fell off the bus"), spec("rank1", "serve"))
    assert launched.wait_for_end() == 1
    log = launched.log.read_text()
    assert "rank0 (pid" in log
    assert "  | RuntimeError: the device fell off the bus" in log


@pytest.mark.parametrize("exit_code", [0, 3])
def test_a_failed_start_reports_the_last_words(exit_code: int, launch: Start, spec: Spec) -> None:
    launched = launch(
        spec("rank0", "never_ready"), spec("rank1", "fail_to_start", words="no such kernel", exit_code=exit_code)
    )
    assert launched.wait_for_end() == 1
    log = launched.log.read_text()
    assert f"exited with code {exit_code}. Its last words:\n  | no such kernel" in log


def test_a_start_error_is_one_line_without_a_traceback(launch: Start, spec: Spec) -> None:
    launched = launch(spec("rank0", "refuse_to_start", words="config.json is missing: give a checkpoint"))
    assert launched.wait_for_end() == 1
    log = launched.log.read_text()
    assert "process_died: rank0: config.json is missing: give a checkpoint (stub_refused)\n" in log
    assert "Traceback" not in log


def test_a_startup_timeout_names_the_process_that_is_late(launch: Start, spec: Spec) -> None:
    launched = launch(spec("rank0", "never_ready"), startup_timeout=0.5)
    assert launched.wait_for_end() == 1
    assert "startup_timeout: not ready after 0.5 s: rank0 (" in launched.log.read_text()


def test_the_progress_of_a_start_is_logged(launch: Start, spec: Spec) -> None:
    launched = launch(spec("rank0", "never_ready"))
    eventually(lambda: "rank0: weights 40 %" in launched.log.read_text())
    launched.popen.send_signal(signal.SIGTERM)
    assert launched.wait_for_end() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_group_cleanly(number: signal.Signals, launch: Start, spec: Spec, tmp_path: Path) -> None:
    launched = launch(*_group(spec))
    launched.wait_until_ready()
    launched.popen.send_signal(number)
    assert launched.wait_for_end() == 0
    assert launched.gone()
    assert (tmp_path / "draining").exists()
    assert (tmp_path / "ended").exists()


def test_under_nohup_the_launcher_outlives_its_terminal(launch: Start, spec: Spec) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launched = launch(*_group(spec))
    finally:
        signal.signal(signal.SIGHUP, before)
    launched.wait_until_ready()
    [ignored] = re.findall(r"SigIgn:\t(\w+)", Path(f"/proc/{launched.popen.pid}/status").read_text())
    assert int(ignored, 16) >> (signal.SIGHUP - 1) & 1
    launched.popen.send_signal(signal.SIGTERM)
    assert launched.wait_for_end() == 0


def test_a_signal_during_the_start_stops_it(launch: Start, spec: Spec, tmp_path: Path) -> None:
    launched = launch(spec("rank0", "never_ready"), spec("frontend", "front"))
    eventually((tmp_path / "progressed").exists)
    launched.popen.send_signal(signal.SIGTERM)
    assert launched.wait_for_end() == 0


def test_the_drain_lasts_until_the_frontend_has_finished(launch: Start, spec: Spec, tmp_path: Path) -> None:
    done = tmp_path / "last-client-left"
    launched = launch(spec("rank0", "serve"), spec("frontend", "front", drain_until=str(done)))
    launched.wait_until_ready()
    launched.popen.send_signal(signal.SIGTERM)
    eventually((tmp_path / "draining").exists)
    assert _runs(launched.pids["rank0"]), "the engine must serve the requests that are drained"
    done.touch()
    assert launched.wait_for_end() == 0
    assert launched.gone()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_drain(number: signal.Signals, launch: Start, spec: Spec, tmp_path: Path) -> None:
    launched = launch(
        spec("rank0", "serve"), spec("frontend", "front", drain_until=str(tmp_path / "never")), drain_timeout=600.0
    )
    launched.wait_until_ready()
    launched.popen.send_signal(number)
    eventually((tmp_path / "draining").exists)
    launched.popen.send_signal(number)
    assert launched.wait_for_end(BREAK_OFF_SECONDS) == 0
    assert launched.gone()


def test_the_frontend_is_told_of_an_engine_that_dies_during_the_drain(
    launch: Start, spec: Spec, tmp_path: Path
) -> None:
    launched = launch(
        spec("rank0", "serve"), spec("frontend", "front", drain_until=str(tmp_path / "never")), drain_timeout=600.0
    )
    launched.wait_until_ready()
    launched.popen.send_signal(signal.SIGTERM)
    eventually((tmp_path / "draining").exists)
    os.kill(launched.pids["rank0"], signal.SIGKILL)
    assert launched.wait_for_end(END_SECONDS) == 1
    assert "rank0" in (tmp_path / "failed").read_text()
    assert launched.gone()


@pytest.mark.parametrize(
    ("victim", "restarted"),
    [
        ("rank0", ["rank0", "rank1"]),
        ("rank1", ["rank0", "rank1"]),
        ("tokenizer0", ["tokenizer0"]),
        ("frontend", ["frontend"]),
    ],
)
def test_a_dead_process_is_restarted_with_its_group(
    victim: str, restarted: list[str], launch: Start, spec: Spec, tmp_path: Path
) -> None:
    launched = launch(*_group(spec), max_restarts=1)
    launched.wait_until_ready()
    before = launched.children()
    os.kill(before[victim], signal.SIGKILL)
    group = "engine" if victim.startswith("rank") else victim
    launched.wait_for_words(f"launcher    {group} is ready again")
    after = launched.children()
    assert sorted(name for name in before if before[name] != after[name]) == restarted
    assert not any(_runs(before[name]) for name in restarted)
    assert not (tmp_path / "failed").exists()
    launched.pids = after
    launched.popen.send_signal(signal.SIGTERM)
    assert launched.wait_for_end() == 0
    assert launched.gone()


def _imports(spec: ProcessSpec, module: str = "email.mime.text", **environment: str) -> ProcessSpec:
    return msgspec.structs.replace(spec, preload=(module,), environment=environment)


def test_one_standby_forks_all_ranks_again_and_again(launch: Start, spec: Spec) -> None:
    ranks = [_imports(spec(f"rank{rank}", "serve")) for rank in range(2)]
    launched = launch(*ranks, spec("frontend", "front"), max_restarts=2)
    launched.wait_until_ready()
    eventually(lambda: "standby-engine" in launched.children())
    standby = launched.children()["standby-engine"]
    for restart in (1, 2):
        before = launched.children()
        os.kill(before["rank1"], signal.SIGKILL)
        eventually(lambda times=restart: launched.log.read_text().count("engine is ready again") == times)
        after = launched.children()
        assert after["standby-engine"] == standby
        for rank in ("rank0", "rank1"):
            assert after[rank] != before[rank]
            assert is_fork(after[rank], standby)
            assert os.getpgid(after[rank]) == after[rank]
    launched.pids = launched.children()
    launched.popen.send_signal(signal.SIGTERM)
    assert launched.wait_for_end() == 0
    assert launched.gone()


def test_prepared_ranks_are_forks_of_a_standby_from_the_first_start_on(launch: Start, spec: Spec) -> None:
    launched = launch(_imports(spec("rank0", "serve")), spec("frontend", "front"), prepare=True, max_restarts=1)
    launched.wait_until_ready()
    first = launched.children()
    assert is_fork(first["rank0"], first["standby-engine"])
    os.kill(first["rank0"], signal.SIGKILL)
    launched.wait_for_words("engine is ready again")
    children = launched.children()
    assert is_fork(children["rank0"], first["standby-engine"])
    os.kill(children["rank0"], signal.SIGTERM)
    assert launched.wait_for_end(END_SECONDS) == 1
    assert f"rank0 (pid {children['rank0']}) was killed by signal 15 (SIGTERM)" in launched.log.read_text()
    launched.pids = children
    assert launched.gone()


def test_a_start_fails_with_the_error_of_the_imports_that_it_waits_for(launch: Start, spec: Spec) -> None:
    launched = launch(_imports(spec("rank0", "serve"), "no_such_module"), prepare=True)
    assert launched.wait_for_end(END_SECONDS) == 1
    log = launched.log.read_text()
    assert "process_died: rank0 was not started, because standby-engine (pid " in log
    assert "No module named 'no_such_module'" in log.partition("process_died")[2]


def test_a_standby_that_hangs_is_replaced(launch: Start, spec: Spec) -> None:
    launched = launch(_imports(spec("rank0", "serve")), prepare=True, max_restarts=2, startup_timeout=3.0)
    launched.wait_until_ready()
    before = launched.children()
    os.kill(before["standby-engine"], signal.SIGSTOP)
    os.kill(before["rank0"], signal.SIGKILL)
    launched.wait_for_words("not ready after 3 s: rank0 (starting)")
    launched.wait_for_words("engine is ready again")
    eventually(lambda: launched.children().get("standby-engine", before["standby-engine"]) != before["standby-engine"])
    assert not _runs(before["standby-engine"])
    launched.popen.send_signal(signal.SIGTERM)
    assert launched.wait_for_end() == 0


def test_processes_that_are_killed_before_they_begin_never_do(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their standby still imports, or does not answer."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    rank0 = _imports(spec("rank0", "never_ready"))
    with selectors.DefaultSelector() as selector:
        group = Group(
            GroupSpec(name="engine", processes=lambda number: [rank0], prepared=[rank0]), selector, "info", print
        )
        group.prepare()
        [standby] = group.standbys
        standby.signal(signal.SIGSTOP)
        group.start(1)
        group.kill()
        assert group.observe().alive == 0
        assert group.describe_exits().startswith("rank0 was killed by signal 9")
        standby.signal(signal.SIGCONT)
        while not standby.has_imported:
            for key, _ in selector.select(0.1):
                key.data()
        # Requests are served in order: with the second process the first one has had its turn.
        second = Process(rank0, selector, "info", print, standby)
        while second.alive and second.progress != "weights 40 %":
            for key, _ in selector.select(0.1):
                key.data()
        assert launched_by(os.getpid()).keys() == {"standby-engine", "rank0"}
        assert launched_by(os.getpid())["rank0"] == second.pid
        second.kill_and_close()
        group.kill_and_close()


class _Look:
    """Notes the standbys once all groups are ready, and stops the supervisor."""

    supervisor: Supervisor

    def __init__(self) -> None:
        self.standbys: list[str] = []

    def watch(self, selector: selectors.BaseSelector) -> None:
        pass

    def tick(self) -> float:
        if self.supervisor.state.started:
            self.standbys += [standby.name for standby in self.supervisor.standbys]
            self.supervisor.drain()
        return time.monotonic() + 1


@pytest.mark.parametrize(("max_restarts", "expected"), [(0, set()), (1, {"standby-engine"})])
def test_a_standby_is_kept_only_where_a_restart_is_allowed(
    spec: Spec, max_restarts: int, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    rank0 = _imports(spec("rank0", "serve"))
    look = _Look()
    look.supervisor = Supervisor(
        [GroupSpec(name="engine", processes=lambda number: [rank0])],
        limits=Limits(max_restarts=max_restarts, restart_window=600, startup_timeout=60),
        drain_timeout=10,
        log_level="info",
        on_line=lambda line: None,
        standby_delay=0.0,
        hooks=look,
    )
    look.supervisor.run()
    assert set(look.standbys) == expected


def test_a_standby_leaves_the_cores_to_others_and_its_forks_do_not(launch: Start, spec: Spec, tmp_path: Path) -> None:
    noted = tmp_path / "niceness"
    rank0 = _imports(spec("rank0", "serve"), "support.launcher.noted_import", NOTED_IMPORT=str(noted))
    launched = launch(rank0, max_restarts=1)
    launched.wait_until_ready()
    eventually(lambda: noted.exists() and noted.read_text())
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert int(noted.read_text()) == min(usual + 10, 19)
    os.kill(launched.pids["rank0"], signal.SIGKILL)
    launched.wait_for_words("engine is ready again")
    fork = launched.children()["rank0"]
    threads = [int(thread.name) for thread in Path(f"/proc/{fork}/task").iterdir()]
    assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {usual}
    launched.popen.send_signal(signal.SIGTERM)
    assert launched.wait_for_end() == 0


def test_a_process_is_restarted_when_its_standby_has_died(launch: Start, spec: Spec) -> None:
    rank0 = _imports(spec("rank0", "serve"), "no_such_module")
    launched = launch(rank0, max_restarts=1)
    launched.wait_until_ready()
    launched.wait_for_words("No module named 'no_such_module'")
    eventually(lambda: "standby-engine" not in launched.children())
    os.kill(launched.pids["rank0"], signal.SIGKILL)
    launched.wait_for_words("engine is ready again")
    launched.popen.send_signal(signal.SIGTERM)
    assert launched.wait_for_end() == 0


def test_a_used_up_budget_stops_all_processes_and_lists_the_failures(launch: Start, spec: Spec, tmp_path: Path) -> None:
    launched = launch(*_group(spec), max_restarts=1)
    launched.wait_until_ready()
    os.kill(launched.pids["tokenizer0"], signal.SIGKILL)
    launched.wait_for_words("tokenizer0 is ready again")
    os.kill(launched.pids["rank1"], signal.SIGTERM)
    assert launched.wait_for_end(END_SECONDS) == 1
    assert launched.gone()
    log = launched.log.read_text()
    assert f"restarts_exhausted: rank1 (pid {launched.pids['rank1']}) was killed by signal 15 (SIGTERM)" in log
    assert "--max-restarts 1 within --restart-window 600 s is used up\n  before: " in log
    assert f"tokenizer0 (pid {launched.pids['tokenizer0']}) was killed by signal 9 (SIGKILL)" in log
    assert "rank1" in (tmp_path / "failed").read_text(), "clients get the reason"


def test_failed_restarts_use_up_the_budget(launch: Start, spec: Spec) -> None:
    broken = spec("rank0", "fail_to_start", words="the device fell off the bus", exit_code=3)
    launched = launch(*_group(spec), then={"rank0": broken}, max_restarts=2)
    launched.wait_until_ready()
    os.kill(launched.pids["rank1"], signal.SIGKILL)
    assert launched.wait_for_end() == 1
    log = launched.log.read_text()
    assert log.count("restarting engine") == 2
    assert "restarts_exhausted: rank0 (pid" in log
    assert "exited with code 3. Its last words:\n  | the device fell off the bus" in log
    assert launched.gone()


def test_a_restart_that_hangs_uses_up_the_budget(launch: Start, spec: Spec) -> None:
    # The timeout includes the first start of four processes, on a machine that other tests keep busy.
    launched = launch(*_group(spec), then={"rank0": spec("rank0", "never_ready")}, max_restarts=1, startup_timeout=20.0)
    launched.wait_until_ready()
    os.kill(launched.pids["rank0"], signal.SIGKILL)
    assert launched.wait_for_end(120) == 1
    assert "restarts_exhausted: not ready after 20 s: rank0 (weights 40 %)" in launched.log.read_text()
    assert launched.gone()


@pytest.mark.parametrize("victim", ["rank0", "frontend"])
def test_a_signal_during_a_restart_stops_all_processes_cleanly(
    victim: str, launch: Start, spec: Spec, tmp_path: Path
) -> None:
    launched = launch(*_group(spec), then={victim: spec(victim, "never_ready")}, max_restarts=1)
    launched.wait_until_ready()
    os.kill(launched.pids[victim], signal.SIGKILL)
    eventually((tmp_path / "progressed").exists)
    launched.popen.send_signal(signal.SIGTERM)
    assert launched.wait_for_end() == 0
    assert launched.gone()


def test_no_process_outlives_a_killed_launcher(launch: Start, spec: Spec) -> None:
    launched = launch(*_group(spec))
    launched.wait_until_ready()
    launched.popen.kill()
    eventually(launched.gone, END_SECONDS)
