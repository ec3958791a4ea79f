"""A server whose engine hangs: the restart, the answers without output yet, and the errors of the others."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.frontend.served import Served, eventually
from support.launcher.hanging_ranks import DIRECTORY
from support.launcher.kill_matrix import Client
from support.tiny_checkpoint import tiny_checkpoint

# Several starts of several processes each, on a machine that may be busy with others.
pytestmark = pytest.mark.timeout(600)

_STALL_SECONDS = "6"
PATIENT = ("--queue-timeout", "240")
"""The answers before a request in the queue may take long on a busy machine."""

Serve = Callable[..., Served]


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    return tmp_path


@pytest.fixture
def serve(hangs: Path) -> Iterator[Serve]:
    started: list[Served] = []
    # Not pytest's own directory: its path is too long for a socket below it.
    with tempfile.TemporaryDirectory(prefix="hangs-") as folder:

        def start(*flags: str) -> Served:
            served = Served(
                tiny_checkpoint(),
                Path(folder),
                *("--served-model-name", "tiny", "--stall-timeout", _STALL_SECONDS),
                *flags,
                program="support.launcher.hanging_ranks",
            )
            started.append(served)
            served.wait_until_ready()
            return served

        yield start
        for served in started:
            served.kill()


def _errors(served: Served) -> str:
    """Messages of the launcher's errors."""
    return "\n".join(
        line["message"] for line in served.lines() if line["level"] == "error" and line["process"] == "launcher"
    )


def _restarts(served: Served) -> int:
    return sum(line["message"].startswith("restarting engine, restart ") for line in served.lines())


def _hang_when_idle(served: Served, hangs: Path, operation: str, symptom: str) -> None:
    """The first requests of an idle server meet a hang."""
    rank0 = served.children()["rank0"]
    (hangs / operation).touch()
    clients = [Client(served.url, "tiny", stream=stream, tokens=40) for stream in (True, False)]
    for client in clients:
        client.join(240)
    assert [client.outcome for client in clients] == ["whole", "whole"]
    assert f"rank0 (pid {rank0}): {symptom}" in _errors(served)
    assert ("rank1: no step in progress" in _errors(served)) == (operation == "desert-1")
    if operation != "desert-1":
        assert "hanging_ranks.py" in served.log.read_text(), "the stacks are logged"


def _hang_under_load(served: Served, hangs: Path, operation: str, symptom: str) -> None:
    """A hang or a failed step meets answers that run and requests that wait."""
    reported = _errors(served).count(symptom)
    streams = [Client(served.url, "tiny", stream=True, tokens=700) for _ in range(4)]
    eventually(lambda: all(client.chunks for client in streams))
    waiting = [Client(served.url, "tiny", stream=number < 2, tokens=40) for number in range(4)]
    eventually(lambda: served.metric("vllm:num_requests_waiting") == 4)
    (hangs / operation).touch()
    for client in (*streams, *waiting):
        client.join(240)
    assert [client.outcome for client in (*streams, *waiting)] == ["whole"] * 8
    assert _errors(served).count(symptom) > reported


def _stop(served: Served, rank: str) -> None:
    pid = served.children()[rank]
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: f"{rank} (pid {pid}): it has sent no heartbeat for" in _errors(served))
    client = Client(served.url, "tiny", stream=True, tokens=40)
    client.join(240)
    assert client.outcome == "whole"


STEP, HEARTBEAT = "a step has not finished for", "it has sent no heartbeat for"


@pytest.mark.parametrize(
    ("flags", "idle", "loaded"),
    [
        ((), {"collect-0": STEP, "lock-0": HEARTBEAT}, {"collect-0": STEP, "fail-0": "MemoryError"}),
        (("--no-overlap",), {"launch-0": STEP}, {"launch-0": STEP}),
        (("--tp", "2"), {"desert-1": STEP}, {"fail-0": "MemoryError"}),
    ],
    ids=["overlap", "no overlap", "two ranks"],
)
def test_answers_go_on_after_hangs_and_failures(
    flags: tuple[str, ...], idle: dict[str, str], loaded: dict[str, str], serve: Serve, hangs: Path
) -> None:
    served = serve("--max-running", "4", "--max-restarts", "10", *PATIENT, *flags)
    for operation, symptom in idle.items():
        _hang_when_idle(served, hangs, operation, symptom)
    for operation, symptom in loaded.items():
        _hang_under_load(served, hangs, operation, symptom)
    assert _restarts(served) == len(idle) + len(loaded)
    if "--tp" in flags:
        _stop(served, "rank1")
    served.popen.send_signal(signal.SIGTERM)
    assert served.popen.wait(60) == 0
    assert served.children() == {} and served.leftovers() == []


def test_hangs_use_up_the_budget_of_restarts(serve: Serve, hangs: Path) -> None:
    served = serve("--max-restarts", "0")
    (hangs / "collect-0").touch()
    client = Client(served.url, "tiny", stream=False, tokens=40)
    client.join(120)
    assert client.outcome == "503 engine_unavailable"
    assert served.popen.wait(60) == 1
    assert "hanging_ranks.py" in served.log.read_text(), "the stacks are logged"
    last = served.lines()[-1]
    assert last["extra"]["code"] == "restarts_exhausted"
    assert "a step has not finished for" in last["message"]
    assert served.children() == {} and served.leftovers() == []
