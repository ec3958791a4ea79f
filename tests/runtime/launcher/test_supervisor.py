"""Groups of stub processes under a real launcher process: starts, deaths, signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from minisgl.launcher.process import ProcessSpec
from support.launcher_group import Group

_TESTS = Path(__file__).parents[2]
_RUNTIME = _TESTS.parent / "runtime"


class Launched:
    """A launcher with its group, and what it said."""

    def __init__(self, group: Group, temporary: Path) -> None:
        path = os.pathsep.join((str(_RUNTIME), str(_TESTS)))
        self.log = temporary / "stderr"
        with self.log.open("w") as stderr:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "support.launcher_group", msgspec.json.encode(group).decode()],
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
        self.pids = ready["pids"]
        self.run_directory = Path(ready["run_directory"])
        assert self.run_directory.is_dir()

    def wait_for_end(self, seconds: float = 10.0) -> int:
        return self.popen.wait(seconds)

    def gone(self) -> bool:
        """Nothing is left of the group: no process, no run directory."""
        return not any(map(_runs, self.pids.values())) and not self.run_directory.exists()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def start(*specs: ProcessSpec, **timeouts: float) -> Launched:
        launched = Launched(Group(specs=list(specs), **timeouts), tmp_path)
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
            name=name, target=f"support.launcher_stubs:{target}", config=settings, drains=target == "front"
        )

    return make


Spec = Callable[..., ProcessSpec]
Launch = Callable[..., Launched]


def _group(spec: Spec) -> list[ProcessSpec]:
    return [spec("rank0", "serve"), spec("rank1", "serve"), spec("tokenizer0", "serve"), spec("frontend", "front")]


@pytest.mark.parametrize("victim", ["rank0", "rank1", "tokenizer0", "frontend"])
def test_any_death_ends_the_group_and_is_named(victim: str, launch: Launch, spec: Spec, tmp_path: Path) -> None:
    launched = launch(*_group(spec))
    launched.wait_until_ready()
    assert Path(f"/proc/{launched.pids[victim]}/comm").read_text() == f"minisgl-{victim}"[:15] + "\n"
    os.kill(launched.pids[victim], signal.SIGKILL)
    assert launched.wait_for_end(10) == 1
    assert launched.gone()
    log = launched.log.read_text()
    assert f"process_died: {victim} (pid {launched.pids[victim]}) was killed by signal 9 (SIGKILL)" in log
    if victim != "frontend":
        assert victim in (tmp_path / "failed").read_text()


def test_last_words_of_an_exception(launch: Launch, spec: Spec) -> None:
    launched = launch(spec("rank0", "raise_after_ready", words="the device fell off the bus"), spec("rank1", "serve"))
    assert launched.wait_for_end() == 1
    log = launched.log.read_text()
    assert "process_died: rank0" in log
    assert "  | RuntimeError: the device fell off the bus" in log


@pytest.mark.parametrize("exit_code", [0, 3])
def test_failed_start_relays_last_words(exit_code: int, launch: Launch, spec: Spec) -> None:
    launched = launch(
        spec("rank0", "never_ready"), spec("rank1", "fail_to_start", words="no such kernel", exit_code=exit_code)
    )
    assert launched.wait_for_end() == 1
    log = launched.log.read_text()
    assert f"ended with exit code {exit_code}. Its last words:\n  | no such kernel" in log


def test_refusal_is_one_line_without_a_traceback(launch: Launch, spec: Spec) -> None:
    launched = launch(spec("rank0", "refuse_to_start", words="config.json is missing: give a checkpoint"))
    assert launched.wait_for_end() == 1
    log = launched.log.read_text()
    assert "process_died: rank0: config.json is missing: give a checkpoint (stub_refused)\n" in log
    assert "Traceback" not in log


def test_startup_timeout_names_who_is_late(launch: Launch, spec: Spec) -> None:
    launched = launch(spec("rank0", "never_ready"), startup_timeout=0.5)
    assert launched.wait_for_end() == 1
    assert "startup_timeout: not ready after 0.5 s: rank0 (" in launched.log.read_text()


def test_progress_of_the_start_is_shown(launch: Launch, spec: Spec) -> None:
    launched = launch(spec("rank0", "never_ready"))
    _eventually(lambda: "rank0: weights 40 %" in launched.log.read_text())
    launched.popen.send_signal(signal.SIGTERM)
    assert launched.wait_for_end() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_group_cleanly(number: signal.Signals, launch: Launch, spec: Spec, tmp_path: Path) -> None:
    launched = launch(*_group(spec))
    launched.wait_until_ready()
    launched.popen.send_signal(number)
    assert launched.wait_for_end() == 0
    assert launched.gone()
    assert (tmp_path / "draining").exists()
    assert (tmp_path / "ended").exists()


def test_a_signal_during_the_start_ends_it(launch: Launch, spec: Spec, tmp_path: Path) -> None:
    launched = launch(spec("rank0", "never_ready"), spec("frontend", "front"))
    _eventually((tmp_path / "progressed").exists)
    launched.popen.send_signal(signal.SIGTERM)
    assert launched.wait_for_end() == 0


def test_drain_lasts_until_the_frontend_is_done(launch: Launch, spec: Spec, tmp_path: Path) -> None:
    done = tmp_path / "last-client-left"
    launched = launch(spec("rank0", "serve"), spec("frontend", "front", drain_until=str(done)))
    launched.wait_until_ready()
    launched.popen.send_signal(signal.SIGTERM)
    _eventually((tmp_path / "draining").exists)
    assert _runs(launched.pids["rank0"]), "the engine must serve what is being drained"
    done.touch()
    assert launched.wait_for_end() == 0
    assert launched.gone()


def test_second_signal_ends_the_drain(launch: Launch, spec: Spec, tmp_path: Path) -> None:
    launched = launch(
        spec("rank0", "serve"), spec("frontend", "front", drain_until=str(tmp_path / "never")), drain_timeout=600.0
    )
    launched.wait_until_ready()
    launched.popen.send_signal(signal.SIGINT)
    _eventually((tmp_path / "draining").exists)
    launched.popen.send_signal(signal.SIGINT)
    assert launched.wait_for_end() == 0
    assert launched.gone()


def test_death_of_an_engine_during_the_drain_reaches_the_frontend(launch: Launch, spec: Spec, tmp_path: Path) -> None:
    launched = launch(
        spec("rank0", "serve"), spec("frontend", "front", drain_until=str(tmp_path / "never")), drain_timeout=600.0
    )
    launched.wait_until_ready()
    launched.popen.send_signal(signal.SIGTERM)
    _eventually((tmp_path / "draining").exists)
    os.kill(launched.pids["rank0"], signal.SIGKILL)
    assert launched.wait_for_end() == 1
    assert "rank0" in (tmp_path / "failed").read_text()
    assert launched.gone()


def test_nothing_survives_a_launcher_that_is_killed(launch: Launch, spec: Spec) -> None:
    launched = launch(*_group(spec))
    launched.wait_until_ready()
    launched.popen.kill()
    launched.popen.wait()
    _eventually(launched.gone)
