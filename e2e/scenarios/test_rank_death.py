"""A rank's engine dies while it streams."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import httpx
import pytest
from openai import APIError, OpenAI

from harness.asking import ANSWER, ask
from harness.client import ClientPod
from harness.installation import kill_operator
from harness.models import cpu_model
from harness.namespace import Namespace

BACK_SECONDS = 10
SLACK = 3
"""The machine that runs this is shared."""
# What each part of a restart leads to, as rank 0's launcher counts them.
PARTS = {
    "reap": "all ranks of the old epoch are gone",
    "join": "both pods take part",
    "start": "the standby processes have taken over",
    "rendezvous": "the ranks have met",
    "load": "weights are loaded",
    "serve": "the replica is ready",
}
KILL = """
import os, pathlib, signal, time

def is_rank1(process):
    try:
        return b"minisgl.launcher.child\\0rank1" in (process / "cmdline").read_bytes()
    except OSError:
        # It has just ended, as those that run commands here do.
        return False

pids = [p.name for p in pathlib.Path("/proc").iterdir() if p.name.isdigit() and is_rank1(p)]
assert len(pids) == 1, pids
print(time.time())
os.kill(int(pids[0]), signal.SIGKILL)
"""


def test_a_killed_rank_fails_the_stream_loudly_and_comes_back_in_its_pod(
    namespace: Namespace, client: ClientPod, figure: Callable[[str], None]
) -> None:
    namespace.apply(cpu_model("demo", tensor=2))
    namespace.wait_for_condition("demo", "Ready")
    pods = {p["metadata"]["uid"] for p in namespace.pods("demo", "engine")}
    openai = client.openai("demo")
    namespace.wait("a standby for each rank", lambda: _standbys(namespace))
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "max_tokens": 1500,
        "ignore_eos": True,
    }
    url = f"{client.service_url('demo')}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=600) as stream:
        lines = stream.iter_lines()
        while '"content":"' not in next(lines):
            continue
        killed = float(namespace.kubectl("exec", "demo-r0-1", "--", "python3", "-c", KILL))
        kill_operator()
        # After the event that says so the connection breaks: nobody can take it for an end.
        rest: list[str] = []
        with pytest.raises(httpx.RemoteProtocolError):
            rest.extend(lines)
    events = [line for line in rest if line]
    assert '"code":"engine_unavailable"' in events[-1]
    assert "[DONE]" not in "".join(events)
    namespace.wait("the right answer", lambda: _answer(openai) == ANSWER)
    assert _ready_after(namespace, killed, time.time(), figure) < BACK_SECONDS * SLACK

    def reported() -> dict[str, object]:
        (replica,) = namespace.status("demo")["replicaStatuses"]
        failure: dict[str, object] = replica.get("lastFailure") or {}
        return failure if replica["phase"] == "Ready" else {}

    failure = namespace.wait("the failure in the status", reported)
    assert (failure["rank"], failure["pod"], failure["exitCode"]) == (1, "demo-r0-1", -9)
    assert "killed by signal 9" in str(failure["message"])
    after = namespace.pods("demo", "engine")
    assert {p["metadata"]["uid"] for p in after} == pods
    assert all(s["restartCount"] == 0 for p in after for s in p["status"]["containerStatuses"])


def _ready_after(namespace: Namespace, killed: float, answered: float, figure: Callable[[str], None]) -> float:
    """Seconds until all ranks served again; prints what they are made of. All runs by the clock of one machine."""
    said = _launcher(namespace, "demo-r0-0")
    detected = datetime.fromisoformat(said["last_failure"]["at"]).timestamp()
    parts = [("the launchers know", detected - killed)]
    parts += [(what, said["timings"][part]) for part, what in PARTS.items()]
    ready = sum(seconds for _, seconds in parts)
    parts.append(("frontends route to it again, and the next answer is there", answered - killed - ready))
    figure(f"kill -9 of a rank to the next answer: {answered - killed:.2f} s, of which")
    for what, seconds in parts:
        figure(f"{seconds:8.2f} s until {what}")
    return ready


def _answer(openai: OpenAI) -> str:
    """The answer, or "" where there is none yet. It is never another one."""
    try:
        answer = ask(openai, "demo")
    except APIError:
        return ""
    assert answer == ANSWER
    return answer


def _standbys(namespace: Namespace) -> bool:
    """Whether each pod has a process that has imported what a rank needs."""
    return all(_launcher(namespace, pod).get("standbys") for pod in ("demo-r0-0", "demo-r0-1"))


def _launcher(namespace: Namespace, pod: str) -> dict[str, Any]:
    """What the launcher of a pod says."""
    fetch = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8080/status').read().decode())"
    said: dict[str, Any] = json.loads(namespace.kubectl("exec", pod, "--", "python3", "-c", fetch))
    return said
