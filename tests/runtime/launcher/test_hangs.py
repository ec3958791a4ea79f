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
    return sum(line["message"].startswith("restarting engine, restart 1 of") for line in served.lines())


@pytest.mark.parametrize(
    ("operation", "flags", "symptom"),
    [
        ("collect-0", (), "a step has not finished for"),
        ("launch-0", ("--no-overlap",), "a step has not finished for"),
        ("lock-0", (), "it has sent no heartbeat for"),
        ("desert-1", ("--tp", "2"), "a step has not finished for"),
    ],
)
def test_the_first_request_of_an_idle_server_outlives_a_hang(
    operation: str, flags: tuple[str, ...], symptom: str, serve: Serve, hangs: Path
) -> None:
    served = serve(*flags)
    rank0 = served.children()["rank0"]
    (hangs / operation).touch()
    clients = [Client(served.url, "tiny", stream=stream, tokens=40) for stream in (True, False)]
    for client in clients:
        client.join(240)
    assert [client.outcome for client in clients] == ["whole", "whole"]
    assert f"rank0 (pid {rank0}): {symptom}" in _errors(served)
    assert ("rank1: no step in progress" in _errors(served)) == (operation == "desert-1")
    assert _restarts(served) == 1
    if operation != "desert-1":
        assert "hanging_ranks.py" in served.log.read_text(), "the stacks are logged"
    served.popen.send_signal(signal.SIGTERM)
    assert served.popen.wait(60) == 0
    assert served.children() == {} and served.leftovers() == []


@pytest.mark.parametrize("operation", ["collect-0", "launch-0"])
def test_answers_go_on_after_a_hang_under_load(operation: str, serve: Serve, hangs: Path) -> None:
    served = serve("--max-running", "4", *PATIENT)
    streams = [Client(served.url, "tiny", stream=True, tokens=700) for _ in range(4)]
    eventually(lambda: all(client.chunks for client in streams))
    waiting = [Client(served.url, "tiny", stream=number < 2, tokens=40) for number in range(4)]
    eventually(lambda: served.metric("vllm:num_requests_waiting") == 4)
    (hangs / operation).touch()
    for client in (*streams, *waiting):
        client.join(240)
    assert [client.outcome for client in (*streams, *waiting)] == ["whole"] * 8
    assert "a step has not finished for" in _errors(served)
    assert _restarts(served) == 1


@pytest.mark.parametrize("flags", [(), ("--tp", "2")])
def test_answers_go_on_after_a_step_that_fails(flags: tuple[str, ...], serve: Serve, hangs: Path) -> None:
    served = serve("--max-running", "2", *PATIENT, *flags)
    streams = [Client(served.url, "tiny", stream=True, tokens=700) for _ in range(2)]
    eventually(lambda: all(client.chunks for client in streams))
    waiting = Client(served.url, "tiny", stream=False, tokens=40)
    eventually(lambda: served.metric("vllm:num_requests_waiting") == 1)
    (hangs / "fail-0").touch()
    for client in (*streams, waiting):
        client.join(240)
    assert [client.outcome for client in (*streams, waiting)] == ["whole"] * 3
    assert "MemoryError" in _errors(served)
    assert _restarts(served) == 1


def test_a_rank_that_is_stopped_is_restarted(serve: Serve) -> None:
    served = serve("--tp", "2")
    rank1 = served.children()["rank1"]
    os.kill(rank1, signal.SIGSTOP)
    eventually(lambda: f"rank1 (pid {rank1}): it has sent no heartbeat for" in _errors(served))
    client = Client(served.url, "tiny", stream=True, tokens=40)
    client.join(240)
    assert client.outcome == "whole"


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
